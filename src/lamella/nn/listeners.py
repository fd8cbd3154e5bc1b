"""Who else wants to know that a model's layers changed: hub, which writes structures into saved configs."""

from collections.abc import Callable
from weakref import WeakSet

from torch import nn

from lamella.nn.linear import StructuredLinear
from lamella.nn.rules import structured_layers

Listener = Callable[[nn.Module, dict[str, StructuredLinear]], None]
_listeners: list[Listener] = []
_changed: WeakSet[nn.Module] = WeakSet()  # for listeners that come later


def add_listener(listener: Listener) -> None:
    """Call `listener(model, structured layers by name)` after every in-place verb, and now for earlier ones."""
    if listener in _listeners:
        return
    _listeners.append(listener)
    for model in list(_changed):
        listener(model, structured_layers(model))


def notify(model: nn.Module) -> None:
    """Tell the listeners that this model's structured layers changed."""
    _changed.add(model)
    for listener in _listeners:
        listener(model, structured_layers(model))
