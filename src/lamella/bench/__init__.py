"""Honest timing."""

from lamella.bench.layers import Timing, interleaved, machine, time_layers, to_rows

__all__ = ["Timing", "interleaved", "machine", "time_layers", "to_rows"]
