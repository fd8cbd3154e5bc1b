"""Honest timing of layers: structured against nn.Linear, interleaved in one run, as ratios.

eff = (speed-up over nn.Linear) / (dense multiply-adds / structured multiply-adds): 1 means that every
multiply-add runs at the dense product's rate.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lamella.nn import StructuredLinear
from lamella.structures import Structure

ROUND_S = 0.02  # a timed round lasts at least this long, so that the clock's grain does not matter
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Timing:
    """One layer at one size. Seconds are medians; spread is (third quartile - first) / median."""

    structure: str
    in_features: int
    out_features: int
    tokens: int
    dtype: str
    backward: bool
    params_frac: float
    multiply_adds_frac: float
    dense_s: float
    structured_s: float
    speed_up: float
    eff: float
    spread: float

    @property
    def faster(self) -> bool:
        return self.speed_up > 1


def time_layers(
    structures: Iterable[Structure],
    shapes: Iterable[tuple[int, int]],
    *,
    tokens: int = 2048,
    dtype: torch.dtype = torch.float32,
    backward: bool = False,
    rounds: int = 9,
) -> list[Timing]:
    """Time each structure at each (in_features, out_features) it fits; others are left out.

    Raises: RuntimeError if a layer disagrees with its dense matrix, before anything is timed.
    """
    timings = []
    for in_features, out_features in shapes:
        dense = nn.Linear(in_features, out_features, dtype=dtype)
        x = torch.randn(tokens, in_features, dtype=dtype, requires_grad=backward)
        layers: dict[str, nn.Module] = {"dense": dense}
        for structure in structures:
            try:
                layer = StructuredLinear(in_features, out_features, structure, dtype=dtype)
            except ValueError:
                continue
            _check(layer, x)
            layers[repr(structure)] = layer
        seconds = interleaved({name: _runner(m, x, backward) for name, m in layers.items()}, rounds)
        base = statistics.median(seconds["dense"])
        for name, layer in layers.items():
            if not isinstance(layer, StructuredLinear):
                continue
            ratios = sorted(d / s for d, s in zip(seconds["dense"], seconds[name], strict=True))
            speed_up = statistics.median(ratios)
            quartiles = statistics.quantiles(ratios, n=4)
            size = in_features * out_features
            timings.append(
                Timing(
                    name,
                    in_features,
                    out_features,
                    tokens,
                    str(dtype).removeprefix("torch."),
                    backward,
                    layer.plan.num_params / size,
                    layer.plan.multiply_adds / size,
                    base,
                    statistics.median(seconds[name]),
                    speed_up,
                    speed_up * layer.plan.multiply_adds / size,
                    (quartiles[2] - quartiles[0]) / speed_up,
                )
            )
    return timings


def interleaved(runners: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each runner in each round; within a round they run in turn."""
    repeats = {}
    for name, run in runners.items():
        run()
        start = time.perf_counter()
        run()
        repeats[name] = max(1, round(ROUND_S / max(time.perf_counter() - start, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run()
            seconds[name].append((time.perf_counter() - start) / repeats[name])
    return seconds


def machine() -> dict[str, object]:
    """What the timings were taken on."""
    return {
        "cpu": _cpu(),
        "bf16_matrix_unit": torch.cpu._is_amx_tile_supported(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")  # Linux
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def to_rows(timings: list[Timing]) -> list[dict[str, object]]:
    return [asdict(t) for t in timings]


def _check(layer: StructuredLinear, x: Tensor) -> None:
    with torch.no_grad():
        few = x[:64]
        wanted = few.double() @ layer.dense().double().T
        error = (layer(few).double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    if error > CHECK_TOLERANCE[x.dtype]:
        raise RuntimeError(f"{layer!r} differs from its dense matrix by {error:.2g}: not timed")


def _runner(layer: nn.Module, x: Tensor, backward: bool) -> Callable[[], object]:
    if not backward:

        def forward() -> None:
            with torch.no_grad():
                layer(x)

        return forward
    upstream = torch.randn_like(layer(x))

    def forward_backward() -> None:
        layer.zero_grad(set_to_none=True)
        layer(x).backward(upstream)

    return forward_backward
