"""TrainConfig: what is refused and why, the learning-rate schedule, and comparing with a stored configuration."""

from typing import Any

import pytest

from lamella.train import TrainConfig

STRUCTURED = {"structure": "LowRank(rank=8)"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"steps": 0}, "steps=0: it must be a positive whole number"),
        ({"steps": 1.5}, "steps=1.5: it must be a positive whole number"),
        ({"batch_size": -4}, "batch_size=-4"),
        ({"context": 0}, "context=0"),
        ({"threads": -1}, "threads=-1"),
        ({"lr": 0.0}, "lr=0.0: it must be a positive number"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"min_lr_frac": 1.1}, "min_lr_frac=1.1: it must be from 0 to 1"),
        ({"warmup_frac": 1.0}, "warmup_frac=1.0: it must be from 0 to below 1"),
        ({"betas": (0.9, 1.0)}, "betas=(0.9, 1.0)"),
        ({"seed": -1}, "seed=-1"),
        (
            {"precision": "bf61"},
            "precision='bf61': it must be one of auto, bf16, fp32 (did you mean 'bf16'?)",
        ),
        ({"batch_size": 8, "accumulate": 3}, "accumulate=3 must divide batch_size=8"),
        ({"structure": "LowRnk(rank=8)"}, "unknown structure 'LowRnk' (did you mean 'LowRank'?)"),
        ({"rules": {"*.mlp.*": "LowRank(rnk=8)"}}, "rule '*.mlp.*': "),
        (STRUCTURED | {"rules": {"*": "LowRank(rank=8)"}}, "give one of them"),
        ({"rules": {"*.mlp.*": "None"}}, "would have no effect"),
        ({"guide": True}, "guide=True has no effect without structure or rules"),
        (STRUCTURED | {"guide_frac": 0.3}, "guide_frac=0.3 has no effect without guide"),
        (STRUCTURED | {"guide": True, "guide_frac": 0}, "guide_frac=0: it must be above 0"),
        (
            STRUCTURED | {"guide_schedule": "linear"},
            "guide_schedule='linear' has no effect without guide",
        ),
        (STRUCTURED | {"guide": True, "guide_schedule": "cos"}, "did you mean 'cosine'?"),
        ({"all_blocks": True}, "all_blocks=True has no effect without structure"),
        ({"zero_last": ["*"]}, "has no effect without structure or rules"),
        ({"out": ""}, "out=''"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        TrainConfig(**{"out": "run"} | settings)
    assert says in str(error.value)


def test_the_learning_rate_rises_to_the_peak_and_falls_to_its_minimum() -> None:
    config = TrainConfig(out="run", steps=100, warmup_frac=0.1, min_lr_frac=0.2)
    values = [config.lr_fraction(step) for step in range(1, 101)]
    assert values[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert values[9] == 1.0
    assert values[54] == pytest.approx(0.6)  # half way between step 10 and step 100
    assert values[99] == pytest.approx(0.2)
    assert values[9:] == sorted(values[9:], reverse=True)
    assert TrainConfig(out="run", steps=100, warmup_frac=0.0).lr_fraction(1) < 1


def test_structures_are_kept_in_their_text_form() -> None:
    config = TrainConfig(out="run", structure="LowRank( rank = 8 )")
    assert config.structure == "LowRank(rank=8)"
    rules = TrainConfig(out="run", rules={"a": "None", "*": "BlockShuffle( num_blocks=4 )"})
    assert rules.rules == {"a": "None", "*": "BlockShuffle(num_blocks=4)"}
    assert rules.structure_rules()["a"] is None


def test_a_configuration_survives_its_dict_form() -> None:
    config = TrainConfig(
        out="run", rules={"*": "LowRank(rank=8)"}, guide=True, betas=(0.8, 0.9), zero_last=["*"]
    )
    assert TrainConfig.from_dict(config.to_dict(), "run") == config
    with pytest.raises(ValueError, match=r"unknown setting 'stpes' \(did you mean 'steps'"):
        TrainConfig.from_dict({"stpes": 3}, "run")


def test_what_is_left_open_agrees_with_what_was_chosen() -> None:
    stored = TrainConfig(
        out="a", precision="bf16", context=64, tokenizer="char", threads=2, device="cpu"
    ).to_dict()
    given = TrainConfig(out="b", lr=1e-3)
    assert given.differences(stored) == {"lr": (1e-3, 3e-3)}
    assert given.with_choices(stored).context == 64
    assert TrainConfig(out="b", precision="fp32", context=64).differences(stored) == {
        "precision": ("fp32", "bf16")
    }
