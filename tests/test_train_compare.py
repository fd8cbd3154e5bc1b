"""Comparing variants under equal training FLOPs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from train_runs import SETTINGS, make_inputs

import lamella.train.compare as compare_module
from lamella.train import RunError, TrainConfig
from lamella.train.compare import CompareConfig, compare, plan_runs, variant_name

VARIANTS = ["dense", "narrow", "LowRank(rank=8)", "BlockShuffle(num_blocks=2)+guide"]


def config(out: Path, base: TrainConfig, **changes: Any) -> CompareConfig:
    return CompareConfig(train=base, out=str(out), **({"variants": VARIANTS} | changes))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    return TrainConfig(**SETTINGS | inputs | {"steps": 10, "eval_every": 5}, out="unused")


def test_every_variant_spends_the_dense_budget_to_within_one_step(tmp_path: Path, base: TrainConfig) -> None:
    runs = {run.variant: run for run in plan_runs(config(tmp_path / "c", base))}
    budget = runs["dense"].flops
    for run in runs.values():
        per_step = run.flops / run.config.steps
        assert budget - 1.6 * per_step < run.flops <= budget, run  # a guided step costs more than the mean
    assert runs["LowRank(rank=8)"].config.steps > runs["dense"].config.steps == base.steps


def test_the_planned_flops_are_those_that_training_counts(
    tmp_path: Path, base: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = config(tmp_path / "c", base, export="LowRank(rank=8)", prompt="It was ")
    document = compare(planned, progress=False)
    rows = {row["variant"]: row for row in document["variants"]}
    for run in plan_runs(planned):
        assert rows[run.variant]["training_flops"] == run.flops
        assert rows[run.variant]["params"] == run.params

    assert rows["narrow"]["ffn_params_nominal_frac"] == 0.5  # 32 of 64
    assert rows["LowRank(rank=8)"]["ffn_params_nominal_frac"] < rows["LowRank(rank=8)"]["ffn_params_frac"] < 1
    with open(tmp_path / "c" / "compare.csv", encoding="utf-8") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == VARIANTS
    table = (tmp_path / "c" / "compare.md").read_text(encoding="utf-8")
    assert "A demonstration, not evidence" in table
    assert all(f"| {variant} |" in table for variant in VARIANTS)
    assert (tmp_path / "c" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "c" / "export" / "config.json").read_text())["model_type"]
    assert document["sample"].startswith("It was ")

    first = json.loads((tmp_path / "c" / "export.json").read_text())
    trained = []
    real = compare_module.train

    def counting(config: TrainConfig, **options: Any) -> dict[str, Any]:
        if not (Path(config.out) / "result.json").exists():
            trained.append(config.out)
        return real(config, **options)

    monkeypatch.setattr(compare_module, "train", counting)
    wider = {"seeds": [0, 1], "variants": [*VARIANTS, "BTT()"], "export": "BTT()"}
    again = compare(config(tmp_path / "c", base, **wider), progress=False)
    assert again["export"]["of"]["variant"] == "BTT()"
    assert again["export"]["parameters"] == first["parameters"]  # merged, both are dense
    assert sorted(p.name for p in (tmp_path / "c").glob(".*")) == [".lock"]
    assert len(trained) == len(VARIANTS) + 2  # seed 1 of all, and BTT; no finished run again
    assert again["variants"][0]["validation_bpb_std"] is not None


def test_equal_tokens_give_every_variant_the_same_steps(tmp_path: Path, base: TrainConfig) -> None:
    runs = plan_runs(config(tmp_path / "c", base, equal="tokens"))
    assert {run.config.steps for run in runs} == {base.steps}


def test_a_failing_variant_is_reported_and_the_others_go_on(
    tmp_path: Path, base: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compare_module.train

    def failing(config: TrainConfig, **options: Any) -> dict[str, Any]:
        if config.structure == "LowRank(rank=8)":
            raise ValueError("step 3: the loss is nan")
        return real(config, **options)

    monkeypatch.setattr(compare_module, "train", failing)
    document = compare(config(tmp_path / "c", base, variants=["dense", "LowRank(rank=8)"]), progress=False)
    assert [row["variant"] for row in document["variants"]] == ["dense"]
    assert document["failed"] == {"LowRank(rank=8) seed 0": "ValueError: step 3: the loss is nan"}
    assert "FAILED LowRank(rank=8) seed 0" in (tmp_path / "c" / "compare.md").read_text(encoding="utf-8")


def test_a_folder_with_another_comparison_or_other_files_is_refused(
    tmp_path: Path, base: TrainConfig
) -> None:
    compare(config(tmp_path / "c", base, variants=["dense"]), progress=False)
    with pytest.raises(RunError, match=r"another comparison \(lr: given 0.5, stored"):
        compare(config(tmp_path / "c", base.replace(lr=0.5), variants=["dense"]), progress=False)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty and holds no"):
        compare(config(tmp_path / "d", base, variants=["dense"]), progress=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Dence", "did you mean"),
        ("narow", "did you mean 'narrow'"),
        ("LowRank(rnk=3)", "did you mean 'rank'"),
        ("LowRank(rank=3)+guides", "only \\+guide"),
        ("dense+guide", "no structured layer"),
    ],
)
def test_an_unknown_variant_names_the_nearest_one(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        variant_name(text)


def test_a_variant_that_does_not_fit_stops_before_anything_runs(tmp_path: Path, base: TrainConfig) -> None:
    with pytest.raises(ValueError, match="num_blocks must divide"):
        compare(
            config(tmp_path / "c", base, variants=["dense", "BlockShuffle(num_blocks=5)"]), progress=False
        )
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": []}, "variants must be one or more"),
        ({"seeds": [1, 1]}, "seeds must be one or more, all different"),
        ({"variants": ["LowRank(rank=8)", "LowRank( rank = 8 )"]}, "the same"),
        ({"variants": ["dense"], "export": "BTT()"}, "none of the variants"),
        ({"variants": ["dense"], "all_blocks": True}, "no effect"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, base: TrainConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path / "c", base, **changes)
