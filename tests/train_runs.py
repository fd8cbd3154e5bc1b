"""Small training runs for the tests: a 2-layer model of width 32 on 60 kB of text."""

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamella.data import austen, prepare
from lamella.hub import load_config
from lamella.train import Interrupted, TrainConfig, loop, train

SETTINGS: dict[str, Any] = {
    "context": 16,
    "steps": 20,
    "batch_size": 4,
    "lr": 1e-2,
    "eval_every": 7,
    "eval_tokens": 64,
    "checkpoint_every": 6,
    "log_every": 3,
    "threads": 1,
}
GUIDED = {"structure": "LowRank(rank=4)", "all_blocks": True, "guide": True}


def make_inputs(folder: Path) -> dict[str, str]:
    """A model directory and a dataset folder: the settings `model` and `data`."""
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = load_config("tiny", **size, num_key_value_heads=2, vocab_size=96, max_position_embeddings=32)
    config.save_pretrained(folder / "model")
    text = austen("train")
    for name, start, stop in (("train", 0, 60_000), ("validation", 60_000, 64_000), ("test", 64_000, 67_000)):
        (folder / f"{name}.txt").write_text(text[start:stop], encoding="utf-8", newline="")
    prepare(
        [folder / "train.txt"],
        folder / "data",
        "char",
        validation_files=[folder / "validation.txt"],
        test_files=[folder / "test.txt"],
    )
    return {"model": str(folder / "model"), "data": str(folder / "data")}


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of the final weights and of metrics.jsonl."""
    files = ("model/model.safetensors", "metrics.jsonl")
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in files}


def train_and_die(settings: dict[str, Any], where: str, count: int) -> None:
    """Train, and kill this process (SIGKILL) at the count-th call of a function of the loop's module."""
    original: Callable[..., Any] = getattr(loop, where)
    calls = 0

    def deadly(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(loop, where, deadly)
    train(TrainConfig(**settings), resume=True, progress=False)


def die_while_saving(settings: dict[str, Any], fsyncs: int) -> None:
    """Train, and kill this process at a given fsync, which is in the middle of writing a checkpoint."""
    original = os.fsync
    calls = 0

    def deadly(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fsyncs:
            os.kill(os.getpid(), signal.SIGKILL)
        original(descriptor)

    os.fsync = deadly
    train(TrainConfig(**settings), resume=True, progress=False)


def train_until_signal(settings: dict[str, Any], where: str, count: int, signums: list[int]) -> None:
    """Train, send this process signals at a call of a function of the loop's module, and exit as the command does."""
    original: Callable[..., Any] = getattr(loop, where)
    calls = 0

    def signalled(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            for signum in signums:
                os.kill(os.getpid(), signum)
        return original(*args, **options)

    setattr(loop, where, signalled)
    try:
        train(TrainConfig(**settings), resume=True, progress=False)
    except Interrupted as interrupted:
        raise SystemExit(interrupted.exit_code) from None
