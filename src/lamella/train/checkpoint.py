"""Checkpoints: folders of safetensors and JSON, verified by SHA-256 when read, free of pickles.

step-00000200/model.safetensors      the state dict, shared tensors once; with the guides while there are any
step-00000200/optimizer.safetensors  "PARAMETER/STATE", e.g. "model.norm.weight/exp_avg"
step-00000200/config.json            the model's config, structures included
step-00000200/state.json             LoopState, aliases of shared tensors, run configuration, versions, digests
"""

import base64
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lamella.train.folder import discard, staged_folder

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "config.json")


class CheckpointError(ValueError):
    """A checkpoint that can't be read; the message says which and why."""


@dataclass(kw_only=True)
class LoopState:
    """All that the training loop carries from one step to the next, but for the model and the optimiser.

    step, tokens, flops: done so far. loss_sum, loss_steps: the training loss since the last line in metrics.jsonl.
    seconds: spent in training steps. active_steps: steps in which every factor could have had a gradient, counted
    until that is checked. guide: the Guide's state dict, None when there is no guide (any more).
    """

    step: int = 0
    tokens: int = 0
    flops: int = 0
    loss_sum: float = 0.0
    loss_steps: int = 0
    seconds: float = 0.0
    best_validation: float | None = None
    best_step: int | None = None
    active_steps: int = 0
    guide: dict[str, Any] | None = None
    metrics_bytes: int = 0
    metrics_sha256: str = field(default_factory=lambda: hashlib.sha256().hexdigest())
    timing_bytes: int = 0
    rng: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files were found whole."""

    path: Path
    state: LoopState
    aliases: dict[str, str]
    config: dict[str, Any]
    versions: dict[str, str]

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Copy the tensors into a model, and the optimiser's state, by parameter name.

        Values are copied, never assigned: memory aligned in another way can change how sums round.

        Raises: CheckpointError if names or shapes differ.
        """
        saved = load_file(self.path / "model.safetensors")
        saved |= {alias: saved[name] for alias, name in self.aliases.items()}
        own = model.state_dict()
        self._check_names(own.keys(), saved.keys())
        for name, tensor in own.items():
            self._check_shape(name, tensor, saved[name])
            tensor.copy_(saved[name])
        if optimizer is not None:
            self._restore_optimizer(model, optimizer)

    def model_differences(self, model: nn.Module) -> dict[str, tuple[Any, Any]]:
        """{field: (the model's, the checkpoint's)} where the Hugging Face configs differ."""
        now, then = (
            json.loads(_model_config(model)),
            json.loads((self.path / "config.json").read_text("utf-8")),
        )
        names = (now.keys() | then.keys()) - {"transformers_version"}
        return {n: (now.get(n), then.get(n)) for n in sorted(names) if now.get(n) != then.get(n)}

    def _restore_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parameters = dict(model.named_parameters())
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        saved = load_file(self.path / "optimizer.safetensors")
        keys = [key.rpartition("/") for key in saved]
        self._check_names(
            {n for n, p in parameters.items() if id(p) in trained}, {name for name, _, _ in keys}
        )
        for name, _, key in keys:
            parameter, value = parameters[name], saved[f"{name}/{key}"]
            if value.ndim == 0:  # a step count
                optimizer.state[parameter][key] = value.clone()
                continue
            self._check_shape(f"{name}/{key}", parameter, value)
            optimizer.state[parameter][key] = torch.zeros_like(parameter).copy_(value)

    def _check_names(self, own: Any, saved: Any) -> None:
        missing, extra = sorted(own - saved), sorted(saved - own)
        if missing or extra:
            raise CheckpointError(
                f"{self.path} is of another model: missing {missing[:3] or 'nothing'}, extra {extra[:3] or 'nothing'}"
            )

    def _check_shape(self, name: str, own: Tensor, saved: Tensor) -> None:
        if own.shape != saved.shape:
            raise CheckpointError(
                f"{self.path}: {name} has the shape {tuple(saved.shape)}, the model's is {tuple(own.shape)}"
            )


def save_checkpoint(
    folder: Path,
    state: LoopState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    config: dict[str, Any],
    versions: dict[str, str],
    keep: int,
) -> Path:
    """Write folder/step-N as a whole, then drop the oldest so that `keep` remain."""
    target = folder / f"step-{state.step:08d}"
    tensors, aliases = _unshared(model.state_dict())
    with staged_folder(target) as aside:
        try:
            save_file(tensors, aside / "model.safetensors")
            save_file(_optimizer_tensors(model, optimizer), aside / "optimizer.safetensors")
        except SafetensorError as error:
            raise OSError(str(error)) from error
        (aside / "config.json").write_text(_model_config(model), encoding="utf-8")
        content = {
            "format": FORMAT,
            "state": asdict(state),
            "aliases": aliases,
            "config": config,
            "versions": versions,
            "sha256": {name: _file_digest(aside / name) for name in FILES},
        }
        content["digest"] = _json_digest(content)
        (aside / "state.json").write_text(json.dumps(content), encoding="utf-8")
    for old in checkpoint_paths(folder)[keep:]:
        discard(old)
    return target


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    return sorted((p for p in folder.glob("step-*") if p.name[5:].isdigit()), reverse=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint's state; `Checkpoint.restore` reads the tensors.

    Raises: CheckpointError if a file is missing, cut short or changed.
    """
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}; this version of lamella reads format {FORMAT}"
            )
        if content.pop("digest") != _json_digest(content):
            raise CheckpointError(f"{path}/state.json is not as it was written")
        for name, digest in content["sha256"].items():
            if _file_digest(path / name) != digest:
                raise CheckpointError(f"{path / name} is not as it was written: cut short or changed")
        known = {f.name for f in fields(LoopState)}
        state = LoopState(**{k: v for k, v in content["state"].items() if k in known})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} can't be read: {error}") from None
    return Checkpoint(
        path=path,
        state=state,
        aliases=content["aliases"],
        config=content["config"],
        versions=content["versions"],
    )


def latest_checkpoint(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint; damaged ones are passed over, which is said. None if there never was one.

    Raises: CheckpointError if there are checkpoints and none is whole.
    """
    paths = checkpoint_paths(folder)
    for path in paths:
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            say(f"passing over a damaged checkpoint: {error}")
    if paths:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole; delete that folder to start the run from its first step"
        )
    return None


def random_state() -> dict[str, Any]:
    """The state of the random generators of torch, numpy and Python, as JSON."""
    kind, keys, *rest = np.random.get_state()
    state = {
        "torch": _encode(torch.get_rng_state()),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = [_encode(s) for s in torch.cuda.get_rng_state_all()]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(_decode(state["torch"]))
    np.random.set_state(tuple(state["numpy"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_decode(s) for s in state["cuda"]])


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _unshared(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors without repeats, {name left out: name of the same tensor})."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            kept[name] = tensor.contiguous()
    return kept, aliases


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value.contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _model_config(model: nn.Module) -> str:
    return model.config.to_json_string(use_diff=False)  # pyright: ignore


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode()).hexdigest()
