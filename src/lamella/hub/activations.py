"""The bytes that autograd keeps of a forward pass, measured on fake tensors: no memory, no arithmetic."""

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PreTrainedModel


def activation_bytes(model: PreTrainedModel, context: int) -> dict[str, int] | None:
    """{module name: bytes kept for the backward pass} of one sequence of `context` tokens.

    A tensor is charged once, to the innermost module that first keeps it; weights are not counted. In the dtype of
    the weights, without autocast, with the model's own attention kernel as on a CPU, and with the loss if the model
    computes one.

    Returns: None for a model that doesn't take input_ids, or can't be run on fake tensors.
    """
    if model.main_input_name != "input_ids":
        return None
    held: list[Any] = []  # keeps storages alive, so that their addresses stay distinct
    seen: set[int] = set()
    kept: dict[str, int] = defaultdict(int)
    running: list[str] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            held.append(storage)
            kept[running[-1] if running else ""] += storage.nbytes()
        return tensor

    def enter(name: str) -> Any:
        return lambda module, inputs: running.append(name)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            state = _fakes(model)
            seen.update(tensor.untyped_storage()._cdata for tensor in state.values())
            ids = torch.zeros(1, context, dtype=torch.long)
            options = {"input_ids": ids, **_through_cache(model)}
            if model.can_generate():
                options["labels"] = ids
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                torch.func.functional_call(model, state, args=(), kwargs=options, tie_weights=False)
    except (RuntimeError, TypeError, ValueError):
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return dict(kept)


class _Through(DynamicCache):
    """A cache that keeps nothing.

    Without any cache transformers looks for packed sequences, and where it can't read the positions, as here, makes a
    T^2 mask and repeats keys and values, which it does not in real training.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states


def _through_cache(model: PreTrainedModel) -> dict[str, Any]:
    accepted = inspect.signature(model.forward).parameters
    name = next((n for n in ("cache", "past_key_values") if n in accepted), None)
    return {} if name is None else {name: _Through(), "use_cache": True}


def _fakes(model: nn.Module) -> dict[str, Tensor]:
    """Fake tensors in place of a model's own, a tied one under all its names.

    A module with several names, such as a list of factors that layers share, comes under its first alone:
    functional_call would otherwise put it back wrongly, and leave fakes in the model.
    """
    fakes: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _fake(tensor)
            state[f"{module_name}.{name}" if module_name else name] = fakes[id(tensor)]
    return state


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").requires_grad_(tensor.requires_grad)
