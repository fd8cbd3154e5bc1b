"""Runs that are killed, stopped or damaged, and continued."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
import yaml
from train_runs import GUIDED, SETTINGS, digests

from lamella.train import CheckpointError, NonFiniteLoss, RunError, TrainConfig, evaluate_path, loop, train
from lamella.train.checkpoint import checkpoint_paths, read_checkpoint

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["lamella.train", "lamella.hub"])  # children fork from it in milliseconds


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return SETTINGS | GUIDED | train_runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished, never interrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(TrainConfig(**base, out=str(out)), progress=False)
    return out


@pytest.fixture(scope="module")
def killed(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "killed"
    _die(train_runs.train_and_die, base | {"out": str(out)}, "_backward", 15)
    assert [p.name for p in checkpoint_paths(out / "checkpoints")] == ["step-00000012", "step-00000006"]
    return out


@pytest.fixture
def part(killed: Path, tmp_path: Path) -> Path:
    """A run killed in step 15, after the checkpoints of steps 6 and 12."""
    return Path(shutil.copytree(killed, tmp_path / "run"))


def _die(target: Any, *args: Any, code: int = -signal.SIGKILL) -> None:
    process = context.Process(target=target, args=args)
    process.start()
    process.join()
    assert process.exitcode == code


def _resume(base: dict[str, Any], out: Path, **changes: Any) -> dict[str, Any]:
    return train(TrainConfig(**base | changes, out=str(out)), resume=True, progress=False)


def test_a_rerun_repeats_every_bit(base: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    train(TrainConfig(**base, out=str(tmp_path / "again")), progress=False)
    assert digests(tmp_path / "again") == digests(whole)


@pytest.mark.parametrize(
    ("where", "count"),
    [("_backward", 2), ("_backward", 8), ("_validate", 2), ("_backward", 17), ("_finish", 1)],
)
def test_a_killed_run_resumes_to_the_same_bits(
    base: dict[str, Any], whole: Path, tmp_path: Path, where: str, count: int
) -> None:
    out = tmp_path / "run"
    _die(train_runs.train_and_die, base | {"out": str(out)}, where, count)
    assert not (out / "result.json").exists()
    _resume(base, out)
    assert digests(out) == digests(whole)


def test_a_run_killed_at_any_fsync_resumes_to_the_same_bits(
    base: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for fsyncs in (3, 9, 12, 14, 17):
        _die(train_runs.die_while_saving, base | {"out": str(out)}, fsyncs)
    _resume(base, out)
    assert digests(out) == digests(whole)
    assert not [p for p in out.rglob("*") if p.name.startswith((".tmp-", ".trash-"))]


def test_sigterm_saves_and_exits_143_and_the_run_resumes_to_the_same_bits(
    base: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = base | {"out": str(out)}
    _die(train_runs.train_until_signal, settings, "_backward", 8, [signal.SIGTERM], code=143)
    assert checkpoint_paths(out / "checkpoints")[0].name == "step-00000008"
    stopped = json.loads((out / "stopped.json").read_text())
    assert f"lamella train --resume {out}" in stopped["message"]
    _resume(base, out)
    assert digests(out) == digests(whole)
    assert not (out / "stopped.json").exists()


def test_ctrl_c_saves_and_exits_130(base: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = base | {"out": str(out)}
    _die(train_runs.train_until_signal, settings, "_backward", 4, [signal.SIGINT], code=130)
    assert checkpoint_paths(out / "checkpoints")[0].name == "step-00000004"


def test_a_second_ctrl_c_kills_at_once(base: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    twice = [signal.SIGINT, signal.SIGINT]
    _die(train_runs.train_until_signal, base | {"out": str(out)}, "_backward", 10, twice, code=-signal.SIGINT)
    assert checkpoint_paths(out / "checkpoints")[0].name == "step-00000006"
    _resume(base, out)
    assert digests(out) == digests(whole)


def test_a_signal_during_the_final_evaluation_stops_at_once(
    base: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = base | {"out": str(out)}
    _die(train_runs.train_until_signal, settings, "save_model", 1, [signal.SIGTERM], code=143)
    assert not (out / "result.json").exists()
    assert not (out / "model").exists()
    _resume(base, out)
    assert digests(out) == digests(whole)


def test_dropout_goes_on_where_it_was(base: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads((Path(base["model"]) / "config.json").read_text()) | {"residual_dropout": 0.2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = base | {"model": str(tmp_path / "config.json"), "steps": 9}
    train(TrainConfig(**settings, out=str(tmp_path / "whole")), progress=False)
    _die(train_runs.train_and_die, settings | {"out": str(tmp_path / "run")}, "_backward", 8)
    _resume(settings, tmp_path / "run")
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "config.json"])
@pytest.mark.parametrize("how", ["cut short", "changed", "missing"])
def test_a_damaged_checkpoint_is_found(part: Path, file: str, how: str) -> None:
    path = checkpoint_paths(part / "checkpoints")[0] / file
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        changed = data[:-40] if how == "cut short" else data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
        path.write_bytes(changed)
    with pytest.raises(CheckpointError, match="step-00000012"):
        read_checkpoint(path.parent)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(
    base: dict[str, Any], whole: Path, part: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint_paths(part / "checkpoints")[0] / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    train(TrainConfig(**base, out=str(part)), resume=True)
    said = capsys.readouterr().err
    assert "passing over a damaged checkpoint" in said
    assert "step-00000012" in said
    assert "after step 6" in said
    assert digests(part) == digests(whole)


def test_without_a_whole_checkpoint_resuming_is_an_error(base: dict[str, Any], part: Path) -> None:
    for path in checkpoint_paths(part / "checkpoints"):
        (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        _resume(base, part)


def test_a_torn_last_line_is_harmless_and_changed_metrics_are_an_error(
    base: dict[str, Any], whole: Path, part: Path
) -> None:
    metrics = part / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace("loss", "lots", 1))
    with pytest.raises(RunError, match=r"metrics\.jsonl is not what it was"):
        _resume(base, part)
    metrics.write_text(text + '{"step": 15, "lo')
    _resume(base, part)
    assert digests(part) == digests(whole)


def test_a_guide_is_part_of_a_checkpoint_only_while_there_is_one(base: dict[str, Any], part: Path) -> None:
    after, during = (read_checkpoint(p) for p in checkpoint_paths(part / "checkpoints"))
    assert during.state.guide == {"steps": 10, "schedule": "cosine", "steps_done": 6}
    assert after.state.guide is None
    keys = (during.path / "optimizer.safetensors").read_bytes()
    assert b"mlp.c_fc.guide/exp_avg" in keys
    assert b"guide" not in (after.path / "optimizer.safetensors").read_bytes()


def test_an_unfinished_run_is_evaluated_by_its_newest_checkpoint(base: dict[str, Any], part: Path) -> None:
    found = evaluate_path(part, base["data"])
    assert "step-00000012 (the run is not finished)" in found.of
    guided = evaluate_path(part / "checkpoints" / "step-00000006", base["data"])
    assert guided.bpb_structured is not None
    assert guided.bpb_structured != guided.bpb


def test_resuming_with_a_changed_configuration_lists_what_changed(base: dict[str, Any], part: Path) -> None:
    with pytest.raises(RunError, match=r"lr: given 0\.02, stored 0\.01; seed: given 1, stored 0"):
        _resume(base, part, lr=0.02, seed=1)


def test_the_stored_configuration_repeats_the_run(whole: Path, tmp_path: Path) -> None:
    stored = yaml.safe_load((whole / "config.yaml").read_text())
    train(TrainConfig.from_dict(stored, str(tmp_path / "again")), progress=False)
    assert digests(tmp_path / "again") == digests(whole)


def test_another_number_of_threads_is_said(
    base: dict[str, Any], part: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(TrainConfig(**base | {"threads": 2}, out=str(part)), resume=True)
    assert "WARNING: threads now 2, at the start 1" in capsys.readouterr().err
    environment = json.loads((part / "environment.json").read_text())
    assert environment["resumed"] == [{"threads": 2}]


def test_changed_data_are_an_error(base: dict[str, Any], part: Path, tmp_path: Path) -> None:
    environment = json.loads((part / "environment.json").read_text())
    (part / "environment.json").write_text(json.dumps(environment | {"data_digest": "0"}))
    with pytest.raises(RunError, match=r"the data .* are not those"):
        _resume(base, part)


def test_a_finished_run_returns_its_result_again(
    base: dict[str, Any], whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(TrainConfig(**base, out=str(whole)), resume=True)
    assert result == json.loads((whole / "result.json").read_text())
    assert "finished already" in capsys.readouterr().err
    with pytest.raises(RunError, match="holds this run already"):
        train(TrainConfig(**base, out=str(whole)), progress=False)
    with pytest.raises(RunError, match=r"another configuration .steps: given 30, stored 20"):
        train(TrainConfig(**base | {"steps": 30}, out=str(whole)), progress=False)


def test_a_loss_that_is_nan_stops_with_step_checkpoint_and_advice(
    base: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = base | {"lr": 1e30, "checkpoint_every": 1, "warmup_frac": 0.0, "out": str(out)}
    with pytest.raises(
        NonFiniteLoss, match=r"step \d+: the loss is .*step-\d+.*lower learning rate"
    ) as error:
        train(TrainConfig(**settings), progress=False)
    stopped = json.loads((out / "stopped.json").read_text())
    assert stopped["status"] == "non-finite loss"
    assert str(error.value) == stopped["message"]
    newest = checkpoint_paths(out / "checkpoints")[0]
    assert read_checkpoint(newest).state.step == stopped["step"] - 1
    assert not (out / "result.json").exists()


def test_two_writers_of_one_folder_are_refused(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(**base, out=str(tmp_path / "run"))
    original = loop._backward

    def second(run: Any, step: int) -> float:
        with pytest.raises(RunError, match=f"another process .pid {os.getpid()}. is writing"):
            train(config, resume=True, progress=False)
        raise KeyError("seen")

    monkeypatch.setattr(loop, "_backward", second)
    with pytest.raises(KeyError, match="seen"):
        train(config, progress=False)
    monkeypatch.setattr(loop, "_backward", original)


def test_a_full_disk_leaves_the_last_good_checkpoint(
    base: dict[str, Any], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    original = loop.save_checkpoint

    def full(*args: Any, **options: Any) -> Any:
        if args[1].step == 12:
            with monkeypatch.context() as patch:
                patch.setattr("lamella.train.checkpoint.save_file", _no_space)
                return original(*args, **options)
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", full)
        with pytest.raises(RunError, match=r"no space left on the disk to write .*step-00000012"):
            train(TrainConfig(**base, out=str(out)), progress=False)
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000006"]
    _resume(base, out)
    assert digests(out) == digests(whole)


def _no_space(tensors: Any, path: Path) -> None:
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


def test_checkpoints_are_rotated_and_hold_no_pickle(whole: Path) -> None:
    paths = checkpoint_paths(whole / "checkpoints")
    assert [p.name for p in paths] == ["step-00000020", "step-00000018"]
    names = {p.suffix for path in paths for p in path.iterdir()}
    assert names == {".safetensors", ".json"}


def test_optimiser_moments_come_back_exactly(base: dict[str, Any], part: Path) -> None:
    checkpoint = read_checkpoint(checkpoint_paths(part / "checkpoints")[1])
    config, dataset, hf_config = loop.resolve(TrainConfig(**base, out=str(part)))
    run = loop.build(config, dataset, hf_config, guided=True)
    checkpoint.restore(run.model, run.optimizer)
    assert run.guide is not None
    run.guide.load_state_dict(checkpoint.state.guide or {})
    names = {id(p): n for n, p in run.model.named_parameters()}
    moments = {names[id(p)] for p in run.optimizer.state}
    assert moments == set(dict(run.model.named_parameters()))
    assert all(float(s["step"]) == 6 for s in run.optimizer.state.values())
    assert any(bool(torch.count_nonzero(s["exp_avg_sq"])) for s in run.optimizer.state.values())


@pytest.mark.parametrize("below", ["file/run", "full"])
def test_an_unusable_folder_is_an_error_before_any_work(
    base: dict[str, Any], tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("")
    with pytest.raises(
        RunError, match=r"can't write to the run folder|is not empty and holds no run .*letter\.txt"
    ):
        train(TrainConfig(**base, out=str(tmp_path / below)), progress=False)
    assert [p.name for p in (tmp_path / "full").iterdir()] in (["letter.txt"], [".lock", "letter.txt"])


def test_a_run_that_cannot_start_leaves_no_folder(base: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no dataset"):
        train(
            TrainConfig(**base | {"data": str(tmp_path / "none")}, out=str(tmp_path / "a" / "run")),
            progress=False,
        )
    assert not (tmp_path / "a").exists()


def test_what_a_crash_left_aside_is_swept(base: dict[str, Any], part: Path) -> None:
    left = (part / ".tmp-model", part / "checkpoints" / ".trash-step-00000001")
    for path in left:
        path.mkdir()
        (path / "file").write_text("x")
    shutil.copytree(part / "checkpoints" / "step-00000012", part / "checkpoints" / ".tmp-step-00000013")
    _resume(base, part)
    assert not any(path.exists() for path in left)
    assert not (part / "checkpoints" / ".tmp-step-00000013").exists()
