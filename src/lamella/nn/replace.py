"""In-place verbs on models: linear layers to structured ones and back."""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lamella.nn.linear import Init, StructuredLinear, check_init
from lamella.nn.listeners import notify
from lamella.nn.rules import is_conv1d, linear_layers, match_patterns, match_rules
from lamella.structures import Structure


@torch.no_grad()
def replace_(
    model: nn.Module,
    rules: Mapping[str, Structure | None],
    keep_weights: bool = False,
    *,
    init: Init = "spectral",
    zero_last: Iterable[str] | str = (),
) -> dict[str, Structure]:
    """Replace linear layers by structured ones, in place.

    Call it on the model that you will save: a save records the structures of the model they were put into.

    rules: fnmatch patterns on full names of linear layers (`*` crosses dots), first match wins; None leaves a layer.
    keep_weights=True projects the old weight and keeps the old bias. False draws new factors by `init`, the
    spectral one with the replaced weight's own standard deviation, and zeroes the bias; a weight that is all zero
    stays zero through its last factor. zero_last: patterns of layers whose last factor starts at zero.

    Returns: {name: structure} of the layers replaced.
    Raises: ValueError, before anything changes, if a pattern decides for no layer, a structure does not fit, a
    weight is shared with another module or not finite, or a layer carries hooks.
    """
    check_init(init, None)
    for pattern, structure in rules.items():
        if structure is not None and not isinstance(structure, Structure):
            raise ValueError(
                f"rule {pattern!r}: expected a structure like LowRank(rank=192) or None, got {structure!r}"
            )
    zero_last = (zero_last,) if isinstance(zero_last, str) else tuple(zero_last)
    if keep_weights and (init != "spectral" or zero_last):
        raise ValueError("keep_weights=True takes the old weights: init and zero_last have no effect with it")
    layers = linear_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} holds no linear layers by name"
            + ("; use StructuredLinear.from_linear for a single one" if isinstance(model, nn.Linear) else "")
        )
    matched = match_rules(layers, rules, "linear layer")
    chosen = {name: structure for name, structure in matched.items() if structure is not None}
    zeroed = match_patterns(chosen, zero_last, "replaced layer") if zero_last else []
    _check_whole(layers, chosen)
    owners = _owners(model)
    made: dict[int, StructuredLinear] = {}
    for name, structure in chosen.items():
        old = layers[name]
        if id(old) in made:
            continue
        try:
            _check_replaceable(name, old, owners)
            if keep_weights and weight_of(old).is_meta:
                raise ValueError("there are no weights to keep on the meta device")
            made[id(old)] = _structured(old, structure, keep_weights, init, name in zeroed)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for name in chosen:
        model.set_submodule(name, made[id(layers[name])])
    notify(model)
    return chosen


@torch.no_grad()
def merge_(model: nn.Module, rules: Iterable[str] | str | None = None) -> dict[str, Structure]:
    """Replace structured layers by the dense layers they equal, in place; a GPT-2 Conv1D comes back as one.

    Products are formed in float32 (float64 for float64 layers) and rounded once to the layer's dtype.
    rules: patterns of the layers to merge, by default all.

    Returns: {name: structure} of the layers merged.
    Raises: ValueError, before anything changes, if a pattern matches no structured layer, there is none, or one is
    still guided, carries hooks or shares its factors.
    """
    layers = {n: m for n, m in linear_layers(model).items() if isinstance(m, StructuredLinear)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} holds no structured layers to merge"
            + ("; call to_linear() on a single one" if isinstance(model, StructuredLinear) else "")
        )
    chosen = match_patterns(layers, "*" if rules is None else rules, "structured layer")
    _check_whole(layers, dict.fromkeys(chosen))
    owners = _owners(model)
    made: dict[int, nn.Module] = {}
    for name in chosen:
        layer = layers[name]
        if id(layer) not in made:
            try:
                _check_replaceable(name, layer, owners)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            made[id(layer)] = _restored(layer)
    structures = {name: layers[name].structure for name in chosen}
    for name in chosen:
        model.set_submodule(name, made[id(layers[name])])
    notify(model)
    return structures


def weight_of(layer: nn.Module) -> Tensor:
    """The matrix (out, in) of any layer that `linear_layers` lists."""
    if isinstance(layer, StructuredLinear):
        return layer.dense()
    weight = layer.get_parameter("weight")
    return weight.T if is_conv1d(layer) else weight


def _structured(
    old: nn.Module, structure: Structure, keep_weights: bool, init: Init, zero_last: bool
) -> StructuredLinear:
    weight = weight_of(old)
    out_features, in_features = weight.shape
    std = None
    if not weight.is_meta and not keep_weights:
        std = weight.float().std(correction=0).item()
        if not std < float("inf"):
            raise ValueError("the weight to replace holds NaN or infinite values")
        if std == 0:
            std, zero_last = None, True
    bias: Tensor | None = getattr(old, "bias", None)
    layer = StructuredLinear(
        in_features,
        out_features,
        structure,
        bias is not None,
        init,
        "meta",
        weight.dtype,
        init_std=std if init == "spectral" else None,
        zero_last=zero_last,
    )
    layer.replaced_class = old.replaced_class if isinstance(old, StructuredLinear) else type(old)
    if not weight.is_meta:
        layer.to_empty(device=weight.device)
        if keep_weights:
            layer.load_projection(weight, bias)
        else:
            layer.reset_parameters()
    trained = old.factors if isinstance(old, StructuredLinear) else [old.get_parameter("weight")]
    layer.factors.requires_grad_(any(p.requires_grad for p in trained))
    if layer.bias is not None and bias is not None:
        layer.bias.requires_grad_(bias.requires_grad)
    return layer.train(old.training)


def _restored(layer: StructuredLinear) -> nn.Module:
    linear = layer.to_linear()
    if layer.replaced_class is nn.Linear:
        return linear
    conv = layer.replaced_class(layer.out_features, layer.in_features)  # Conv1D(nf, nx)
    conv.weight = nn.Parameter(linear.weight.T.contiguous(), linear.weight.requires_grad)
    bias = (
        linear.bias if linear.bias is not None else nn.Parameter(linear.weight.new_zeros(layer.out_features))
    )
    conv.bias = copy.copy(bias)
    return conv.train(layer.training)


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Parameter id -> the distinct modules' names that hold it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return owners


def _check_whole(layers: Mapping[str, nn.Module], chosen: Mapping[str, Structure | None]) -> None:
    """A module under several names changes under all of them, in one way, or not at all."""
    for name, structure in chosen.items():
        for other, module in layers.items():
            if module is layers[name] and (other not in chosen or chosen[other] != structure):
                raise ValueError(
                    f"{name} and {other} are the same module: the rules must say the same of both"
                )


def _check_replaceable(name: str, old: nn.Module, owners: dict[int, list[str]]) -> None:
    for parameter in old.parameters():
        others = [other for other in owners[id(parameter)] if not f"{other}.".startswith(f"{name}.")]
        if others:
            raise ValueError(f"its weight is shared with {others[0]}: untie it first, or leave the layer out")
    kinds = ("forward", "forward_pre", "backward", "backward_pre", "state_dict", "state_dict_pre")
    if any(getattr(old, f"_{kind}_hooks") for kind in kinds):
        raise ValueError("the layer carries hooks, which would be lost; remove them first")
    if isinstance(old, StructuredLinear) and old.guide is not None:
        raise ValueError("the layer is guided: call remove() on its Guide first")
