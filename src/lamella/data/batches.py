"""Which tokens a step sees: training batches and evaluation windows."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np
import torch

from .tokens import Tokens


class Batches:
    """Training batches, a pure function of (seed, step, rank, world).

    In each epoch the text, read as a ring from a random phase, is cut into num_tokens // context windows of
    `context` predicted tokens (each preceded by the token before the first), drawn in random order. So an
    epoch predicts every token once, but for num_tokens % context that change with the phase. Window i of the
    endless sequence of epochs is in the batch of step i // batch_size, and rank r takes the rows
    [r * batch_size / world, (r + 1) * batch_size / world) of that batch.

    Raises: ValueError if a number is out of range, world does not divide batch_size, or the text has fewer
        windows than one batch.
    """

    def __init__(
        self, tokens: Tokens, *, batch_size: int, context: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        numbers = {"batch_size": batch_size, "context": context, "world": world}
        for name, number in numbers.items():
            if operator.index(number) < 1:
                raise ValueError(f"{name}={number}: it must be at least 1.")
        if not 0 <= operator.index(seed) < 2**64:
            raise ValueError(f"seed={seed}: it must be at least 0 and below 2**64.")
        if not 0 <= operator.index(rank) < world:
            raise ValueError(f"rank={rank} with world={world}: it must be at least 0 and below world.")
        if batch_size % world:
            raise ValueError(f"batch_size={batch_size} must be a multiple of world={world}.")
        self.num_windows = tokens.num_tokens // context
        if self.num_windows < batch_size or tokens.num_tokens <= context:
            raise ValueError(
                f"the text has {tokens.num_tokens} tokens, which is {self.num_windows} windows of "
                f"context={context}: fewer than one batch of batch_size={batch_size}. "
                "Give more text, or a smaller batch_size or context."
            )
        self.tokens = tokens
        self.batch_size, self.context, self.seed = batch_size, context, seed
        self.rank, self.world = rank, world
        self._starts: dict[int, np.ndarray] = {}

    def at(self, step: int) -> torch.Tensor:
        """(batch_size // world, context + 1) int64: the rows of this rank at a step, counted from 0."""
        if step < 0:
            raise ValueError(f"step={step}: it must be at least 0.")
        rows = self.batch_size // self.world
        first = step * self.batch_size + self.rank * rows
        starts = np.array([self._start(window) for window in range(first, first + rows)])
        positions = starts[:, None] + np.arange(self.context + 1)  # (rows, context + 1)
        return torch.from_numpy(self.tokens.take(positions % self.tokens.num_tokens))

    def _start(self, window: int) -> int:
        epoch, place = divmod(window, self.num_windows)
        if epoch not in self._starts:
            for old in [e for e in self._starts if abs(e - epoch) > 1]:
                del self._starts[old]
            self._starts[epoch] = self._epoch_starts(epoch)
        return self._starts[epoch][place]

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        # Raw bits and a stable sort: unlike Generator.permutation they are the same in every numpy version.
        bits = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(
            self.num_windows + 1
        )
        phase = int(bits[0]) % self.tokens.num_tokens
        return phase + self.context * np.argsort(bits[1:], kind="stable")


def windows(tokens: Tokens, context: int, limit_tokens: int | None = None) -> Iterator[torch.Tensor]:
    """Evaluation windows in order: (context + 1,) int64 each, the last one shorter where it has to be.

    Consecutive windows overlap by one token, so that every token but the first is predicted exactly once.
    limit_tokens: predict at most that many tokens, from the start of the text.
    Raises: ValueError if context or limit_tokens is below 1, or the text has fewer than 2 tokens.
    """
    if operator.index(context) < 1:
        raise ValueError(f"context={context}: it must be at least 1.")
    if limit_tokens is not None and operator.index(limit_tokens) < 1:
        raise ValueError(f"limit_tokens={limit_tokens}: it must be at least 1, or None for all.")
    if tokens.num_tokens < 2:
        raise ValueError(f"the text has {tokens.num_tokens} tokens; evaluation needs at least 2.")
    last = tokens.num_tokens - 1 if limit_tokens is None else min(limit_tokens, tokens.num_tokens - 1)
    return (
        torch.from_numpy(tokens.take(np.arange(start, min(start + context, last) + 1)))
        for start in range(0, last, context)
    )
