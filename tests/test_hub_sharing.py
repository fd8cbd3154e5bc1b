"""Factors that several structured layers share are saved once, and shared again after loading."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from lamella import BTT, LowRank, Structure, replace_
from lamella.hub import account, build_model, export, ffn_rules, load_config, load_model
from lamella.hub.quiet import no_progress_bars

IDS = torch.arange(24).reshape(2, 12)
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
FIRST, SECOND, THIRD = (f"model.layers.{k}.mlp.c_fc" for k in (1, 2, 3))


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with no_progress_bars():
        yield


def structured(structure: Structure, **overrides: object) -> PreTrainedModel:
    model = build_model(load_config("tiny", **{**SIZES, **overrides})).eval()
    replace_(model, ffn_rules(model, structure))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def shared() -> PreTrainedModel:
    """The second layer has all factors of the first, the third has one factor and the bias of it."""
    model = structured(BTT(rho=2))
    first, second, third = map(model.get_submodule, (FIRST, SECOND, THIRD))
    second.factors = first.factors
    third.factors[1] = first.factors[1]
    third.bias = first.bias
    return model


ALIASES = {
    f"{SECOND}.factors.0": f"{FIRST}.factors.0",
    f"{SECOND}.factors.1": f"{FIRST}.factors.1",
    f"{THIRD}.factors.1": f"{FIRST}.factors.1",
    f"{THIRD}.bias": f"{FIRST}.bias",
}


def assert_shares(model: PreTrainedModel) -> None:
    for key, source in ALIASES.items():
        assert model.get_parameter(key) is model.get_parameter(source), key


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_shared_factors_are_stored_once_and_shared_after_loading(
    tmp_path: Path, shared: PreTrainedModel, shard: str
) -> None:
    shared.save_pretrained(tmp_path / "first", max_shard_size=shard)
    stored = {key for file in (tmp_path / "first").glob("*.safetensors") for key in load_file(file)}
    assert stored.isdisjoint(ALIASES)
    assert stored.issuperset(ALIASES.values())
    saved = json.loads((tmp_path / "first" / "config.json").read_text())["quantization_config"]
    assert saved["shared"] == ALIASES
    for load in (load_model, AutoModelForCausalLM.from_pretrained):
        loaded = load(tmp_path / "first")
        assert_shares(loaded)
        assert torch.equal(logits(loaded), logits(shared))
        assert account(loaded).parameters == account(shared).parameters
    loaded.save_pretrained(tmp_path / "second")
    again = load_model(tmp_path / "second", dtype=torch.bfloat16)
    assert_shares(again)
    assert again.get_parameter(f"{SECOND}.factors.0").dtype == torch.bfloat16
    again.half().tie_weights()
    assert_shares(again)


def test_the_bare_model_and_a_freshly_built_one_share_too(tmp_path: Path, shared: PreTrainedModel) -> None:
    shared.save_pretrained(tmp_path / "causal")
    bare = AutoModel.from_pretrained(tmp_path / "causal")
    assert bare.layers[2].mlp.c_fc.factors[0] is bare.layers[1].mlp.c_fc.factors[0]
    assert torch.equal(bare(IDS).last_hidden_state, shared.model(IDS).last_hidden_state)
    bare.save_pretrained(tmp_path / "bare")
    assert torch.equal(
        AutoModel.from_pretrained(tmp_path / "bare")(IDS).last_hidden_state, bare(IDS).last_hidden_state
    )
    assert_shares(build_model(load_config(tmp_path / "causal")))
    assert_shares(build_model(load_config(tmp_path / "causal"), "meta"))


def test_a_model_that_no_longer_shares_says_nothing_of_it(tmp_path: Path, shared: PreTrainedModel) -> None:
    shared.save_pretrained(tmp_path / "shared")
    loaded = load_model(tmp_path / "shared")
    for key in ALIASES:
        parent, _, name = key.rpartition(".")
        copied = torch.nn.Parameter(loaded.get_parameter(key).detach().clone())
        setattr(loaded.get_submodule(parent), name, copied)
    loaded.save_pretrained(tmp_path / "apart")
    config = json.loads((tmp_path / "apart" / "config.json").read_text())
    assert sorted(config["quantization_config"]) == ["format_version", "layers", "quant_method"]
    assert torch.equal(logits(load_model(tmp_path / "apart")), logits(shared))


def test_a_structured_export_keeps_the_sharing(tmp_path: Path, shared: PreTrainedModel) -> None:
    export(shared, None, tmp_path / "out", structured=True)
    assert_shares(load_model(tmp_path / "out"))


def test_a_merged_export_of_shared_factors_is_plain(tmp_path: Path, shared: PreTrainedModel) -> None:
    export(shared, None, tmp_path / "out")
    # float32: one merged product against two, each rounded
    torch.testing.assert_close(logits(load_model(tmp_path / "out")), logits(shared), rtol=1e-4, atol=1e-4)
    assert_shares(shared)


@pytest.mark.parametrize(
    ("key", "what"), [(f"{SECOND}.factors.0", "extra"), (f"{FIRST}.factors.0", "missing")]
)
def test_strict_keys_know_what_is_shared(
    tmp_path: Path, shared: PreTrainedModel, key: str, what: str
) -> None:
    shared.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if what == "extra":
        tensors[key] = torch.ones(1)
    else:
        del tensors[key]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{what}: {key}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "shared must map"),
        ({f"{SECOND}.weight": f"{FIRST}.factors.0"}, "no factor or bias"),
        ({"model.layers.0.mlp.c_fc.bias": f"{FIRST}.bias"}, "no factor or bias"),
        ({f"{SECOND}.bias": f"{THIRD}.bias", f"{THIRD}.bias": f"{FIRST}.bias"}, "itself not stored"),
        ({f"{SECOND}.factors.0": f"{FIRST}.factors.7"}, "the config shares"),
        ({f"{SECOND}.factors.0": f"{FIRST}.bias"}, "the config shares"),
    ],
)
def test_a_shared_entry_that_cannot_be_is_an_error(tmp_path: Path, entry: object, message: str) -> None:
    structured(LowRank(rank=8)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["shared"] = entry
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)
