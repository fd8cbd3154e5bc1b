"""What a run computes and writes."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from torch import nn
from train_runs import GUIDED, SETTINGS

from lamella.hub import account, load_model
from lamella.nn import structured_layers
from lamella.train import RunError, TrainConfig, loop, train
from lamella.train.setup import build, initial_model, resolve


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return SETTINGS | train_runs.make_inputs(tmp_path_factory.mktemp("inputs"))


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_a_run_folder_holds_all_that_a_run_leaves(base: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = base | GUIDED | {"precision": "bf16"}
    result = train(TrainConfig(**settings, out=str(out)), progress=False)
    assert {p.name for p in out.iterdir()} == {
        *("config.yaml", "environment.json", "tokenizer.json", "metrics.jsonl", "timing.jsonl"),
        *("checkpoints", "model", "result.json", ".lock"),
    }
    metrics = lines(out)
    assert [line["step"] for line in metrics] == [3, 6, 7, 9, 12, 14, 15, 18, 20]
    assert [line["step"] for line in lines(out, "timing.jsonl")] == [line["step"] for line in metrics]
    assert [line["step"] for line in metrics if "alpha" in line] == [3, 6, 7, 9]
    assert metrics[0]["alpha"] == pytest.approx((1 + math.cos(math.pi * 2 / 10)) / 2)
    assert [line["step"] for line in metrics if "val_bpb" in line] == [7, 14, 20]
    assert [line["step"] for line in metrics if "val_bpb_structured" in line] == [7]
    assert result == json.loads((out / "result.json").read_text())
    assert result["steps"] == 20
    assert result["tokens"] == 20 * 4 * 16
    model = load_model(out)
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    plain = account(model, 16, activations=False)
    assert result["flops"] == 4 * 16 * (
        20 * plain.training_flops + 10 * (plain.guided_training_flops - plain.training_flops)
    )
    assert metrics[-1]["flops"] == result["flops"]
    assert len(structured_layers(model)) == 4


def test_the_loss_falls_well_below_that_of_a_uniform_guess(base: dict[str, Any], tmp_path: Path) -> None:
    settings = base | {
        "steps": 120,
        "batch_size": 8,
        "log_every": 20,
        "checkpoint_every": 120,
        "eval_every": 120,
    }
    result = train(TrainConfig(**settings, out=str(tmp_path / "run")), progress=False)
    metrics = lines(tmp_path / "run")
    assert metrics[-1]["loss"] < 3.2 < metrics[0]["loss"] < 1.2 * math.log(96)
    assert result["validation_bpb"] < 4.6 < math.log2(96)


def test_micro_batches_give_the_gradient_of_the_whole_batch(base: dict[str, Any], tmp_path: Path) -> None:
    gradients = []
    for accumulate in (1, 2):
        settings = base | {"precision": "fp32", "batch_size": 16, "accumulate": accumulate}
        config, dataset, hf_config = resolve(TrainConfig(**settings, out=str(tmp_path)))
        run = build(config, dataset, hf_config, guided=False)
        loss = loop._backward(run, 0)
        gradients.append((loss, [p.grad for p in run.model.parameters()]))
    (loss, whole), (split_loss, split) = gradients
    assert split_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)


def test_variants_share_the_initial_weights_that_they_have_in_common(
    base: dict[str, Any], tmp_path: Path
) -> None:
    def initial(**changes: Any) -> dict[str, torch.Tensor]:
        config, _, hf_config = resolve(TrainConfig(**base | changes, out=str(tmp_path)))
        return initial_model(config, hf_config).state_dict()

    dense = initial()
    ffn = {name for name in dense if ".mlp." in name and name.endswith("weight")}
    structured = initial(structure="LowRank(rank=4)", all_blocks=True)
    narrow = initial(ffn_width=32)
    other = initial(structure="BlockShuffle(num_blocks=4)")
    for variant in (structured, narrow, other):
        common = {n for n in dense if n in variant and variant[n].shape == dense[n].shape}
        assert common >= dense.keys() - ffn - {n for n in dense if n.endswith("c_fc.bias")}
        assert all(torch.equal(dense[n], variant[n]) for n in common)
    assert not torch.equal(dense["model.embed_tokens.weight"], initial(seed=1)["model.embed_tokens.weight"])
    assert "model.layers.0.mlp.c_fc.weight" in other
    assert "model.layers.1.mlp.c_fc.factors.0" in other


def test_a_layer_that_gets_no_gradient_is_named(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop.build

    def cut(*args: Any, **options: Any) -> Any:
        run = original(*args, **options)
        run.model.get_submodule("model.layers.1.mlp").forward = lambda x: x * 1
        return run

    monkeypatch.setattr(loop, "build", cut)
    with pytest.raises(
        RunError, match=r"no gradient reached model\.layers\.1\.mlp\.c_fc\.factors\.0, .* in 3 steps"
    ):
        train(TrainConfig(**base, structure="LowRank(rank=4)", out=str(tmp_path / "run")), progress=False)


@pytest.mark.parametrize("guide", [False, True])
def test_a_last_factor_that_starts_at_zero_passes_the_gradient_check(
    base: dict[str, Any], tmp_path: Path, guide: bool
) -> None:
    settings = base | {"structure": "LowRank(rank=4)", "zero_last": ["*.c_proj"], "guide": guide, "steps": 8}
    train(TrainConfig(**settings, out=str(tmp_path / "run")), progress=False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"context": 33}, "context=33 is more than the 32 positions of"),
        ({"batch_size": 10_000}, "fewer than one batch"),
        (
            {"data": "austen", "tokenizer": "bpe-300"},
            "has a vocabulary of 96 tokens, but the tokenizer 'bpe-300'",
        ),
        ({"tokenizer": "byte"}, "tokenized with 'char', but 'byte' was asked for"),
        ({"model": "tny"}, "did you mean 'tiny'"),
        ({"structure": "BlockShuffle(num_blocks=5)"}, "does not fit 32 -> 64"),
        ({"rules": {"*.nothing.*": "LowRank(rank=4)"}}, "matches no linear layer"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"device": "tpu-ish"}, "it must be cpu, cuda"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    base: dict[str, Any], tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        train(TrainConfig(**base | settings, out=str(tmp_path / "run")), progress=False)
    assert says in str(error.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_preset_takes_vocabulary_and_positions_from_data_and_context(
    base: dict[str, Any], tmp_path: Path
) -> None:
    settings = base | {"model": "tiny", "context": 24}
    _, _, hf_config = resolve(TrainConfig(**settings, out=str(tmp_path)))
    assert (hf_config.vocab_size, hf_config.max_position_embeddings) == (96, 24)


def test_training_leaves_torch_as_it_was(base: dict[str, Any], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(TrainConfig(**base | {"steps": 2}, out=str(tmp_path / "run")), progress=False)
        assert torch.get_num_threads() == 2
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(before)


def test_a_log_file_gets_plain_lines(
    base: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(TrainConfig(**base | {"steps": 7}, out=str(tmp_path / "run")))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "step 3/7  loss " in shown.err
    assert all(word in shown.err for word in ("bpb", "val bpb", "tokens/s", "FLOPs", "ETA"))
    assert "\x1b" not in shown.err


def test_the_training_modules_load_without_transformers() -> None:
    code = "import sys, lamella.train; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_number_of_parameters_counts_tied_weights_once(base: dict[str, Any], tmp_path: Path) -> None:
    result = train(TrainConfig(**base | {"steps": 1}, out=str(tmp_path / "run")), progress=False)
    model: nn.Module = load_model(tmp_path / "run")
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
