"""Optimiser groups."""

from lamella.optim.groups import format_groups, param_groups

__all__ = ["format_groups", "param_groups"]
