"""The training loop.

The order within a step is fixed, so that a resumed run repeats it bit for bit: forward and backward over the
micro-batches, clipping, the optimiser, the guide (which goes when its schedule ends), metrics and evaluation,
checkpoint.
"""

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from lamella.data import Tokens
from lamella.optim import format_groups
from lamella.train.checkpoint import (
    Checkpoint,
    LoopState,
    checkpoint_paths,
    latest_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)
from lamella.train.config import TrainConfig
from lamella.train.evaluate import Evaluation, evaluate
from lamella.train.folder import LineLog, RunError, RunFolder, read_config, staged_folder, write_atomic
from lamella.train.interrupts import Signals, resume_command
from lamella.train.progress import Report
from lamella.train.setup import Run, build, environment, factor_parameters, pinned, resolve, versions

GRADIENT_CHECK_STEPS = (
    3  # a last factor that starts at zero lets the others have gradients from the second step on
)


DEFAULT_LR = TrainConfig(out="-").lr


class NonFiniteLoss(ValueError):
    """The loss or the gradient norm became infinite or NaN."""


def train(config: TrainConfig, *, resume: bool = False, progress: bool = True) -> dict[str, Any]:
    """Train a model in the run folder `config.out`; returns the content of its result.json.

    resume: continue the run in the folder from its newest checkpoint, bit for bit, or start it if there is none; a
    finished run just returns its result. progress: show it, on stderr.

    Raises: ValueError if the configuration can't be used, the folder holds another run, or the loss becomes NaN;
        Interrupted after SIGINT or SIGTERM, when the state is saved.
    """
    report = Report(config.steps, shown=progress)
    with RunFolder(config.out) as folder:
        if folder.has_run:
            _check_same_run(folder, config, resume)
            config = config.with_choices(folder.config)
            if (result := folder.result) is not None:
                report.say(f"{folder.path} is finished already, at step {result['steps']}")
                return result
        config, dataset, hf_config = resolve(config)
        found = environment(config, dataset)
        _begin(folder, config, found, dataset.tokenizer, report)
        with pinned(config):
            checkpoint = latest_checkpoint(folder.checkpoints, report.say)
            state = LoopState() if checkpoint is None else checkpoint.state
            guided = config.guide if checkpoint is None else state.guide is not None
            run = build(config, dataset, hf_config, guided)
            if checkpoint is not None:
                _check_same_settings(checkpoint, config, run)
                checkpoint.restore(run.model, run.optimizer)
                if run.guide is not None and state.guide is not None:
                    run.guide.load_state_dict(state.guide)
                set_random_state(state.rng)
                report.say(f"resuming {folder.path} after step {state.step}")
            report.say(format_groups(run.optimizer.param_groups))
            with Signals(folder, report) as signals:
                _run_steps(run, state, folder, report, signals)
                signals.immediate_step = state.step
                return _finish(run, state, folder, report)


def resume(run: str | os.PathLike[str], *, progress: bool = True) -> dict[str, Any]:
    """Continue the run in a folder with its own configuration; see `train`."""
    return train(TrainConfig.from_dict(read_config(run), str(run)), resume=True, progress=progress)


def _run_steps(run: Run, state: LoopState, folder: RunFolder, report: Report, signals: Signals) -> None:
    config, model, optimizer = run.config, run.model, run.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    metrics = LineLog(
        folder.path / "metrics.jsonl", num_bytes=state.metrics_bytes, sha256=state.metrics_sha256
    )
    timing = LineLog(folder.path / "timing.jsonl", num_bytes=state.timing_bytes)
    gradients = _GradientCheck(run, state)
    window_tokens, window_seconds = 0, 0.0
    model.train()
    report.start(state.step)
    try:
        while state.step < config.steps:
            started = time.perf_counter()
            step, tokens, flops = state.step + 1, run.tokens_per_step, run.flops_per_step
            alpha = None if run.guide is None else run.guide.alpha
            loss = _backward(run, state.step)
            grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip).item()
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise _non_finite(folder, config, step, loss, grad_norm)
            gradients.check()
            lr_fraction = config.lr_fraction(step)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lr_fraction
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if run.guide is not None:
                run.guide.step()
                if run.guide.finished:
                    run.guide.remove(optimizer)
                    run.guide = None
                    parameters = [p for group in optimizer.param_groups for p in group["params"]]

            seconds = time.perf_counter() - started
            state.step, state.tokens, state.flops = step, state.tokens + tokens, state.flops + flops
            state.loss_sum, state.loss_steps = state.loss_sum + loss, state.loss_steps + 1
            state.seconds += seconds
            window_tokens, window_seconds = window_tokens + tokens, window_seconds + seconds
            report.advance(step)

            last = step == config.steps
            evaluates = step % config.eval_every == 0 or last
            if step % config.log_every == 0 or evaluates:
                line = {
                    "step": step,
                    "tokens": state.tokens,
                    "flops": state.flops,
                    "loss": state.loss_sum / state.loss_steps,
                    "lr": config.lr * lr_fraction,
                    "grad_norm": grad_norm,
                }
                line |= {} if alpha is None else {"alpha": alpha}
                line |= _validate(run, state) if evaluates else {}
                metrics.write(line)
                speed = window_tokens / window_seconds
                timing.write({"step": step, "seconds": state.seconds, "tokens_per_s": speed})
                _show(report, run, state, line, speed)
                state.loss_sum, state.loss_steps = 0.0, 0
                window_tokens, window_seconds = 0, 0.0

            stopped = signals.received
            if step % config.checkpoint_every == 0 or last or stopped is not None:
                metrics.sync()
                timing.sync()
                state.metrics_bytes, state.metrics_sha256 = metrics.num_bytes, metrics.sha256
                state.timing_bytes = timing.num_bytes
                _save(run, state, folder)
            if stopped is not None:
                raise signals.interrupted(step)
    finally:
        report.stop()
        metrics.close()
        timing.close()


def _backward(run: Run, step: int) -> float:
    """Leave the gradient of the mean loss over the step's batch in the parameters; returns that loss."""
    config, device = run.config, run.device
    total = torch.zeros((), device=device)
    for ids in run.batches.at(step).to(device).chunk(config.accumulate):
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            logits = run.model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()) / config.accumulate
        loss.backward()
        total += loss.detach()
    return total.item()


def _validate(run: Run, state: LoopState) -> dict[str, float]:
    """Bits per byte on the start of the validation split; while guided also of the structured layers alone."""

    def bpb() -> float:
        return evaluate(
            run.model,
            run.dataset.validation,
            context=run.batches.context,
            tokenizer=run.dataset.tokenizer,
            limit_tokens=run.config.eval_tokens,
        ).bpb

    found = {"val_bpb": bpb()}
    if run.guide is not None:
        with run.guide.structured_only():
            found["val_bpb_structured"] = bpb()
    if state.best_validation is None or found["val_bpb"] < state.best_validation:
        state.best_validation, state.best_step = found["val_bpb"], state.step
    return found


def _save(run: Run, state: LoopState, folder: RunFolder) -> None:
    state.guide = None if run.guide is None else run.guide.state_dict()
    state.rng = random_state()
    save_checkpoint(
        folder.checkpoints,
        state,
        run.model,
        run.optimizer,
        config=run.config.to_dict(),
        versions=versions(),
        keep=run.config.keep_checkpoints,
    )


def _finish(run: Run, state: LoopState, folder: RunFolder, report: Report) -> dict[str, Any]:
    """Evaluate on validation and test, write RUN/model, and last RUN/result.json."""
    from lamella.hub import account

    def score(tokens: Tokens, split: str) -> Evaluation:
        with report.counted(f"evaluating on {split}", "tokens") as progress:
            return evaluate(
                run.model,
                tokens,
                context=run.batches.context,
                tokenizer=run.dataset.tokenizer,
                limit_tokens=run.config.final_eval_tokens,
                progress=progress,
            )

    validation = score(run.dataset.validation, "validation")
    test = None if run.dataset.test is None else score(run.dataset.test, "test")
    with staged_folder(folder.model) as aside:
        save_model(run, aside)
    counted = account(run.model, run.batches.context, activations=False)
    result = {
        "steps": state.step,
        "tokens": state.tokens,
        "flops": state.flops,
        "parameters": counted.parameters,
        "ffn_parameters": counted.ffn_parameters,
        "validation_bpb": validation.bpb,
        "validation_perplexity": validation.perplexity,
        "test_bpb": None if test is None else test.bpb,
        "test_perplexity": None if test is None else test.perplexity,
        "best_validation_bpb": state.best_validation,
        "best_step": state.best_step,
        "seconds": state.seconds,
        "tokens_per_s": state.tokens / state.seconds,
    }
    (folder.path / "stopped.json").unlink(missing_ok=True)
    folder.write_json("result.json", result)
    test_part = "" if test is None else f", test {test.bpb:.4f}"
    report.say(f"finished {folder.path}: validation {validation.bpb:.4f} bits per byte{test_part}")
    return result


def save_model(run: Run, folder: Path) -> None:
    """Write the model with its tokenizer in `save_pretrained` form."""
    from lamella.hub import fast_tokenizer, write_directory

    write_directory(run.model, fast_tokenizer(run.dataset.tokenizer, run.model), folder)


class _GradientCheck:
    """Sees to it, once, that a gradient reaches every factor within the first steps in which one can.

    While the guide's share rounds to 1, as it does at the start, the factors' gradients are exactly zero.
    """

    def __init__(self, run: Run, state: LoopState) -> None:
        self.run, self.state = run, state
        done = state.active_steps >= GRADIENT_CHECK_STEPS
        self.unseen = {} if done else factor_parameters(run.model)
        if not done:
            state.active_steps = 0

    def check(self) -> None:
        if self.state.active_steps >= GRADIENT_CHECK_STEPS:
            return
        seen = [name for name, p in self.unseen.items() if p.grad is not None and bool(p.grad.any())]
        for name in seen:
            del self.unseen[name]
        guide = self.run.guide
        self.state.active_steps += guide is None or float(1 - torch.tensor(guide.alpha)) > 0
        if self.unseen and self.state.active_steps >= GRADIENT_CHECK_STEPS:
            raise RunError(
                f"no gradient reached {', '.join(list(self.unseen)[:6])} in {GRADIENT_CHECK_STEPS} steps: these layers "
                "do not train. Are they part of the model's forward pass?"
            )


def _check_same_run(folder: RunFolder, config: TrainConfig, resume: bool) -> None:
    differences = config.differences(folder.config)
    if differences:
        listed = "; ".join(
            f"{n}: given {given!r}, stored {stored!r}" for n, (given, stored) in differences.items()
        )
        raise RunError(
            f"{folder.path} holds a run with another configuration ({listed}): "
            "give another folder, or continue that run with its own configuration"
        )
    if not resume:
        raise RunError(
            f"{folder.path} holds this run already: continue it with {resume_command(folder.path)}, "
            "or give another folder"
        )


def _begin(
    folder: RunFolder, config: TrainConfig, found: dict[str, Any], tokenizer: Any, report: Report
) -> None:
    """Write what a new run's folder says of it, or compare the machine and the data with those the run began on."""
    if not folder.has_run:
        folder.write_json("environment.json", found)
        write_atomic(folder.tokenizer, tokenizer.to_str(pretty=True).encode())
        folder.write_config(config.to_dict())
        return
    began = folder.read_json("environment.json")
    if began.get("data_digest") != found["data_digest"]:
        raise RunError(
            f"the data {config.data} are not those that {folder.path} was begun with: restore them, or start a new run"
        )
    changed = {
        n: (found[n], began.get(n)) for n in ("versions", "processor", "threads") if found[n] != began.get(n)
    }
    for name, (now, then) in changed.items():
        report.say(
            f"WARNING: {name} now {now!r}, at the start {then!r}: the last bits of the results may differ"
        )
    if changed:
        began.setdefault("resumed", []).append({name: now for name, (now, _) in changed.items()})
        folder.write_json("environment.json", began)
    (folder.path / "stopped.json").unlink(missing_ok=True)


def _check_same_settings(checkpoint: Checkpoint, config: TrainConfig, run: Run) -> None:
    """The run folder's files, or the model's own config, may have been edited since the checkpoint was written."""
    changed = config.differences(checkpoint.config)
    changed |= {
        f"model config {name}": pair for name, pair in checkpoint.model_differences(run.model).items()
    }
    if changed:
        listed = "; ".join(f"{n}: now {now!r}, then {then!r}" for n, (now, then) in changed.items())
        raise RunError(
            f"{checkpoint.path} was written with other settings ({listed}): restore them, or start a new run"
        )


def _non_finite(
    folder: RunFolder, config: TrainConfig, step: int, loss: float, grad_norm: float
) -> NonFiniteLoss:
    saved = next(
        (f"the last good checkpoint is {p}" for p in checkpoint_paths(folder.checkpoints)), "none is saved"
    )
    message = (
        f"step {step}: the loss is {loss} and the gradient norm {grad_norm}; {saved}. Resuming would repeat this: "
        f"start a new run with a lower learning rate, such as lr={min(config.lr / 3, DEFAULT_LR):.1e}, or a longer "
        "warm-up"
    )
    folder.write_json("stopped.json", {"status": "non-finite loss", "step": step, "message": message})
    return NonFiniteLoss(message)


def _show(report: Report, run: Run, state: LoopState, line: dict[str, Any], speed: float) -> None:
    train = run.dataset.train
    bpb = line["loss"] / math.log(2) * train.num_tokens / train.num_bytes
    remaining = (run.config.steps - state.step) * run.tokens_per_step / speed
    report.line(state.step, line["loss"], bpb, line.get("val_bpb"), speed, remaining, state.flops)
