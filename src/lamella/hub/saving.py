"""Saving and loading structured Hugging Face models, through transformers' own quantisation hook.

The structures of a model are kept in its config as a `quantization_config` of method "lamella". On loading,
transformers hands it to `LamellaQuantizer`, which swaps the layers while the model is on the meta device, so that
the weights load into the factors. Nothing is quantised: every flag that says so is cleared afterwards.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lamella.hub.checkpoint import check_factors
from lamella.hub.sharing import (
    check_shared,
    declared,
    in_model,
    layers_by_every_name,
    share_,
    shared_parameters,
)
from lamella.nn import StructuredLinear, add_listener, replace_
from lamella.structures import Structure, parse_structure

METHOD = "lamella"
FORMAT_VERSION = 1


@dataclass
class LamellaConfig(QuantizationConfigMixin):
    """The structures of a model, as its config.json keeps them.

    layers: full layer name -> the structure's text form. shared: name of a parameter that isn't stored -> name of
    the one it is, of layers that share factors; absent from the file where none do. inner: the quantization_config
    the model had besides, if any. The class of a replaced layer needs no record: the model's own code makes it before
    it is replaced.

    Raises: ValueError for a newer format version or an entry that can't be read.
    """

    quant_method: str = METHOD
    format_version: int = FORMAT_VERSION
    layers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    inner: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.format_version, int) or not 1 <= self.format_version <= FORMAT_VERSION:
            raise ValueError(
                f"this model was saved in lamella format {self.format_version}; this lamella reads up to format "
                f"{FORMAT_VERSION}: upgrade lamella"
            )
        self.structures()
        try:
            check_shared(self.shared, self.layers)
        except ValueError as error:
            raise ValueError(f"quantization_config of method {METHOD!r}: {error}") from None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        unknown = set(config_dict) - {"quant_method", "format_version", "layers", "shared", "inner"}
        if unknown and config_dict.get("format_version") == FORMAT_VERSION:
            raise ValueError(
                f"quantization_config of method {METHOD!r} has unknown entries {sorted(unknown)}"
            )
        known = {k: v for k, v in config_dict.items() if k not in unknown}
        return super().from_dict(known, return_unused_kwargs, **kwargs)

    def structures(self) -> dict[str, Structure]:
        """{layer name: structure}. Raises: ValueError for a text that is no structure."""
        if not isinstance(self.layers, Mapping):
            raise ValueError(f"quantization_config of method {METHOD!r}: layers must map names to structures")
        return {name: parse_structure(text) for name, text in self.layers.items()}

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "quant_method": self.quant_method,
            "format_version": self.format_version,
            "layers": dict(self.layers),
        }
        if self.shared:
            plain["shared"] = dict(self.shared)
        if self.inner is not None:
            plain["inner"] = self.inner.to_dict() if hasattr(self.inner, "to_dict") else dict(self.inner)
        return plain


class LamellaQuantizer(HfQuantizer):
    """Swaps layers before weights load. An inner quantiser, where there is one, does its work too."""

    quantization_config: LamellaConfig

    def __init__(self, quantization_config: LamellaConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        inner = quantization_config.inner
        self.inner = None if inner is None else AutoHfQuantizer.from_config(inner, **kwargs)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        structures = self.quantization_config.structures()
        names = names_in_model(structures, model)
        rules = {present: structures[name] for name, present in names.items()}
        if rules:
            replace_(model, rules, init="mup")  # on the meta device nothing is drawn
        for name in rules:
            # Some models initialise a child's `weight` from its parent (GPT-2 its c_proj); these come from the files.
            for part in (name, name.rpartition(".")[0]):
                model.get_submodule(part).__dict__["_is_hf_initialized"] = True
        shared = in_model(self.quantization_config.shared, names)
        share_(model, shared)
        model.all_tied_weights_keys.update(
            shared
        )  # transformers ties them once more when the weights are there
        if checkpoint_files is not None:
            check_factors(model, [str(file) for file in checkpoint_files], shared)
        if self.inner is not None:
            self.inner.preprocess_model(model, checkpoint_files=checkpoint_files, **kwargs)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> PreTrainedModel:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)
        for flag in ("hf_quantizer", "quantization_method"):
            model.__dict__.pop(flag, None)
        model.is_quantized = False
        if self.inner is not None:
            model.hf_quantizer = self.inner
            model.is_quantized = True
            model.quantization_method = self.inner.quantization_config.quant_method
            self.inner.postprocess_model(model)
        _record(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def update_dtype(self, dtype: Any) -> Any:
        return dtype if self.inner is None else self.inner.update_dtype(dtype)

    def update_device_map(self, device_map: Any) -> Any:
        return device_map if self.inner is None else self.inner.update_device_map(device_map)

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if self.inner is not None:
            self.inner.validate_environment(*args, **kwargs)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return self.inner is not None and self.inner.param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self) -> Any:
        return super().get_quantize_ops() if self.inner is None else self.inner.get_quantize_ops()

    def get_weight_conversions(self) -> list[Any]:
        return [] if self.inner is None else self.inner.get_weight_conversions()

    def update_weight_conversions(self, weight_conversions: Any, model: PreTrainedModel) -> Any:
        owner = super() if self.inner is None else self.inner
        return owner.update_weight_conversions(weight_conversions, model)


class GuidedModel(HfQuantizer):
    """Stands on a model while it is guided, so that `save_pretrained` refuses: the guide is not part of the model."""

    def __init__(self, layer: str, held: HfQuantizer | None) -> None:
        super().__init__(LamellaConfig())
        self.layer = layer
        self.held = held

    def is_serializable(self) -> bool:
        raise ValueError(
            f"{self.layer} is guided, and a guided model can't be saved as a finished one: "
            "call remove() on its Guide first"
        )

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def take_structures(config: PreTrainedConfig) -> tuple[PreTrainedConfig, LamellaConfig]:
    """Take lamella's part out of a config, in place; returns the config and that part, which may be empty."""
    ours = getattr(config, "quantization_config", None)
    if isinstance(ours, Mapping) and ours.get("quant_method") == METHOD:
        ours = LamellaConfig.from_dict(dict(ours))
    if not isinstance(ours, LamellaConfig):
        return config, LamellaConfig()
    _set_or_drop(config, ours.inner)
    return config, ours


def build_structures_(model: nn.Module, ours: LamellaConfig) -> None:
    """Give a freshly built model the structures of its config, and what they share."""
    if ours.layers:
        replace_(model, ours.structures())
        share_(model, ours.shared)
        _record(model)


def names_in_model(structures: Mapping[str, Structure], model: PreTrainedModel) -> dict[str, str]:
    """{layer's name: its name in this model}, which may lack or add the base model's prefix.

    Layers of a head that this class doesn't have are left out when it is another class than the one saved.

    Raises: ValueError naming the layers that the model doesn't have.
    """
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    found: dict[str, str] = {}
    absent = []
    for name in structures:
        present = next((n for n in (name, prefix + name, name.removeprefix(prefix)) if n in modules), None)
        if present is not None:
            found[name] = present
        elif name.startswith(prefix) or type(model).__name__ in (model.config.architectures or ()):
            absent.append(name)
    if absent:
        raise ValueError(
            f"the config gives structures for layers {type(model).__name__} doesn't have: {absent[:10]}"
        )
    return found


def _record(model: nn.Module, layers: Mapping[str, StructuredLinear] | None = None) -> None:
    """Keep the structures of the Hugging Face models in `model` in their configs; called after every change."""
    for outermost in _outermost(model):
        _record_one(outermost)


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _record_one(model: Any) -> None:
    layers = layers_by_every_name(model)
    standing = getattr(model, "hf_quantizer", None)
    guided = next((name for name, layer in layers.items() if layer.guide is not None), None)
    if guided is not None and not isinstance(standing, GuidedModel):
        model.hf_quantizer = GuidedModel(guided, standing)
    elif guided is None and isinstance(standing, GuidedModel):
        del model.hf_quantizer
        if standing.held is not None:
            model.hf_quantizer = standing.held

    had = getattr(model.config, "quantization_config", None)
    inner = had.inner if isinstance(had, LamellaConfig) else had
    if not layers:
        if isinstance(had, LamellaConfig):
            _set_or_drop(model.config, inner)
        return
    if not isinstance(had, LamellaConfig):
        _own_config(model)
    texts = {name: repr(layer.structure) for name, layer in layers.items()}
    model.config.quantization_config = LamellaConfig(
        layers=texts, shared=shared_parameters(model), inner=inner
    )


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a config of its own, since models made from one config object share it."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and id(config) in copies:
            module.config = copies[id(config)]


def _set_or_drop(config: Any, inner: Any) -> None:
    if inner is not None:
        config.quantization_config = inner
    elif hasattr(config, "quantization_config"):
        del config.quantization_config


def _saving_what_is_shared(save_pretrained: Any) -> Any:
    """save_pretrained that knows of shared factors. Layers come to share them without a word to anyone, and
    transformers writes the config first, so there is no later moment to look."""

    @functools.wraps(save_pretrained)
    def save(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        shared = shared_parameters(self)
        ours = getattr(self.config, "quantization_config", None)
        if shared != (ours.shared if isinstance(ours, LamellaConfig) else {}):
            _record(self)
        with declared(self, shared):
            return save_pretrained(self, *args, **kwargs)

    return save


PreTrainedModel.save_pretrained = _saving_what_is_shared(PreTrainedModel.save_pretrained)
register_quantization_config(METHOD)(LamellaConfig)
register_quantizer(METHOD)(LamellaQuantizer)
add_listener(_record)
