"""Self-guided training (arXiv 2406.16450): a dense weight helps at first and fades.

A guided layer computes a W x + (1 - a) S(x). W, the guide, starts as the exact dense matrix of S, so nothing changes at
step 0, and a falls from 1 to 0.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from lamella.nn.linear import StructuredLinear
from lamella.nn.listeners import notify
from lamella.nn.rules import match_patterns, structured_layers
from lamella.structures import suggest

Schedule = Literal["cosine", "linear"]
SCHEDULES = ("cosine", "linear")


def guide_(
    model: nn.Module, steps: int, schedule: Schedule = "cosine", rules: Iterable[str] | str | None = None
) -> "Guide":
    """Add a dense guide to the structured layers of a model, in place; make the optimiser afterwards.

    steps: the number of `Guide.step()` calls over which a falls from 1 to 0. rules: patterns of the structured layers
    to guide, by default all that have more than one factor.

    Raises: ValueError if there is nothing to guide, a layer is guided already, or steps or schedule are wrong.
    """
    layers = {n: m for n, m in structured_layers(model).items() if m.plan.num_factors > 1}
    if not layers:
        raise ValueError(f"{type(model).__name__} holds no structured layers to guide; call replace_ first")
    if rules is not None:
        layers = {n: layers[n] for n in match_patterns(layers, rules, "structured layer")}
    guided = [name for name, layer in layers.items() if layer.guide is not None]
    if guided:
        raise ValueError(f"{guided[0]} is guided already; remove() its Guide first")
    guide = Guide(model, layers, steps, schedule)
    for layer in layers.values():
        first = layer.factors[0]
        layer.guide = nn.Parameter(layer.dense().detach(), first.requires_grad)
        layer.guide_alpha = torch.ones((), device="cpu" if first.is_meta else first.device)
    notify(model)
    return guide


class Guide:
    """The schedule of a model's guides; made by `guide_`. Call `step()` after each optimiser step."""

    def __init__(
        self, model: nn.Module, layers: dict[str, StructuredLinear], steps: int, schedule: Schedule
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"guide: steps must be a positive integer, got {steps!r}")
        if schedule not in SCHEDULES:
            raise ValueError(
                f"unknown guide schedule {schedule!r}{suggest(str(schedule), SCHEDULES)}: "
                f"it must be one of {', '.join(SCHEDULES)}"
            )
        self.model = model
        self.layers = layers
        self.steps = steps
        self.schedule = schedule
        self.steps_done = 0
        self._looked_past = 0  # how many structured_only() are open

    @property
    def alpha(self) -> float:
        """The guide's share now: 1 at first, 0 from `steps` on."""
        if self.steps_done >= self.steps:
            return 0.0
        progress = self.steps_done / self.steps
        return (1 + math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else 1 - progress

    @property
    def finished(self) -> bool:
        """Whether the share has reached 0, so that `remove` changes no output."""
        return self.steps_done >= self.steps

    def step(self) -> None:
        """Advance the schedule by one step."""
        self.steps_done += 1
        self._share()

    def _share(self) -> None:
        alpha = 0.0 if self._looked_past else self.alpha
        for layer in self.layers.values():
            if layer.guide is not None:  # anew: backward may still need the one of the last forward
                layer.guide_alpha = torch.full_like(layer.guide_alpha, alpha)

    @contextmanager
    def structured_only(self) -> Iterator[None]:
        """A context in which the layers run their structured part alone, for evaluation."""
        self._looked_past += 1
        self._share()
        try:
            yield
        finally:
            self._looked_past -= 1
            self._share()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "schedule": self.schedule, "steps_done": self.steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: ValueError if the state is of another schedule or length."""
        if (state["steps"], state["schedule"]) != (self.steps, self.schedule):
            raise ValueError(
                f"the saved guide ran {state['steps']} {state['schedule']} steps, "
                f"this one {self.steps} {self.schedule} steps"
            )
        self.steps_done = int(state["steps_done"])
        self._share()

    def remove(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop the guides, and their parameters and state from the optimiser.

        Before the schedule has `finished` this changes the output, by the guide's remaining share. A group that this
        empties stays, since schedulers count groups.
        """
        dropped = {}
        for layer in self.layers.values():
            if layer.guide is not None:
                dropped[id(layer.guide)] = layer.guide
                layer.guide = None
                del layer.guide_alpha
        notify(self.model)
        if optimizer is None:
            return
        for parameter in dropped.values():
            optimizer.state.pop(parameter, None)
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in dropped]
