"""How y = W x runs."""

from lamella.ops.contract import apply, dense

__all__ = ["apply", "dense"]
