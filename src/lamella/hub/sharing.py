"""Parameters that several structured layers share: stored once, with the other names kept in the config."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from lamella.nn import StructuredLinear

_OWN_KEY = re.compile(r"(.+)\.(factors\.\d+|bias)")


def layers_by_every_name(model: nn.Module) -> dict[str, StructuredLinear]:
    """The structured layers of a model, also under their second names."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, StructuredLinear)}


def shared_parameters(model: nn.Module) -> dict[str, str]:
    """{name: the first name of the same parameter}, of factors and biases that structured layers share."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for layer, module in layers_by_every_name(model).items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            key = f"{layer}.{name}"
            if _OWN_KEY.fullmatch(key) and first.setdefault(id(parameter), key) != key:
                shared[key] = first[id(parameter)]
    return shared


def check_shared(shared: object, layers: Mapping[str, str]) -> None:
    """Raises: ValueError unless `shared` maps parameters of these layers to parameters that are stored."""
    if not isinstance(shared, Mapping):
        raise ValueError("shared must map names of parameters to the names they are stored by")
    for key in (*shared.keys(), *shared.values()):
        own = _OWN_KEY.fullmatch(key) if isinstance(key, str) else None
        if own is None or own[1] not in layers:
            raise ValueError(f"shared names {key!r}, which is no factor or bias of a structured layer")
    chained = [key for key, source in shared.items() if source in shared]
    if chained:
        raise ValueError(
            f"shared stores {chained[0]} by a name that is itself not stored: {shared[chained[0]]}"
        )


def in_model(shared: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """`shared` with layers called as in the model, by {name in the config: name in the model}; absent ones go."""

    def called(key: str) -> str | None:
        own = _OWN_KEY.fullmatch(key)
        return f"{names[own[1]]}.{own[2]}" if own and own[1] in names else None

    pairs = ((called(key), called(source)) for key, source in shared.items())
    return {key: source for key, source in pairs if key is not None and source is not None}


def share_(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Let each name stand for the parameter of the name it is stored by.

    Raises: ValueError if the two have different shapes or don't exist.
    """
    for key, source in shared.items():
        parent, _, name = key.rpartition(".")
        try:
            kept, given_up = model.get_parameter(source), model.get_parameter(key)
        except AttributeError as error:
            raise ValueError(f"the config shares {key} with {source}: {error}") from None
        if kept.shape != given_up.shape:
            raise ValueError(
                f"the config shares {key}, {tuple(given_up.shape)}, with {source}, {tuple(kept.shape)}"
            )
        setattr(model.get_submodule(parent), name, kept)


def unshare_(model: nn.Module) -> None:
    """Give each structured layer factors and a bias of its own, where several share them."""
    for key in shared_parameters(model):
        layer = model.get_submodule(key.rpartition(".factors.")[0] or key.rpartition(".")[0])
        for name, parameter in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        if isinstance(layer, StructuredLinear):
            layer.factors = nn.ParameterList(
                nn.Parameter(f.detach().clone(), f.requires_grad) for f in layer.factors
            )


@contextmanager
def declared(model: PreTrainedModel, shared: Mapping[str, str]) -> Iterator[None]:
    """Within it transformers, while saving, takes these names for tied weights and leaves them out of the files."""
    before = model.__dict__.get("_tied_weights_keys")
    usual = getattr(model, "_tied_weights_keys", None) or {}
    own = {f"^{re.escape(key)}$": source for key, source in shared.items()}
    model.__dict__["_tied_weights_keys"] = {**usual, **own}
    try:
        yield
    finally:
        if before is None:
            del model.__dict__["_tied_weights_keys"]
        else:
            model.__dict__["_tied_weights_keys"] = before
