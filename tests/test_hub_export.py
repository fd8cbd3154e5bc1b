"""Export: merged for plain transformers, or structured; verified from a fresh process before it appears."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GPT2Config, PreTrainedModel

from lamella import BTT, LowRank, StructuredLinear, guide_, replace_
from lamella.hub import build_model, export, ffn_rules, load_config, load_model

IDS = torch.arange(24).reshape(2, 12)


def characters(*special: str) -> Tokenizer:
    letters = sorted({*(chr(k) for k in range(32, 127)), "\n"})
    tokenizer = Tokenizer(models.WordLevel({c: k for k, c in enumerate(letters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def structured(**overrides: object) -> PreTrainedModel:
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = build_model(load_config("tiny", **{**sizes, **overrides})).eval()
    replace_(model, ffn_rules(model, BTT(rho=2)))
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits


def test_a_merged_export_loads_without_lamella_and_agrees(tmp_path: Path) -> None:
    model = structured(eos_token_id=7, bos_token_id=7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_json_string()
    report = export(model, characters(), tmp_path / "out")
    assert report["max_logit_difference"] < 1e-5
    assert json.loads(json.dumps(report)) == report
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]

    assert model.config.to_json_string() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    loaded = load_model(tmp_path / "out")
    assert not any(isinstance(m, StructuredLinear) for m in loaded.modules())
    torch.testing.assert_close(logits(loaded), logits(model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.model_max_length == 128
    assert tokenizer.decode(tokenizer("to be")["input_ids"]).replace(" ", "") == "tobe"

    saved = {p.name: json.loads(p.read_text()) for p in (tmp_path / "out").glob("*.json")}
    assert saved["config.json"]["rope_theta"] == saved["config.json"]["rope_parameters"]["rope_theta"]
    assert saved["config.json"]["dtype"] == saved["config.json"]["torch_dtype"] == "float32"
    assert "quantization_config" not in saved["config.json"]
    assert saved["tokenizer_config.json"]["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert saved["generation_config.json"].get("eos_token_id") is None  # the tokenizer has none


def test_a_structured_export_keeps_the_factors_and_the_end_token(tmp_path: Path) -> None:
    model = structured()
    report = export(
        model, characters("<|endoftext|>"), tmp_path, structured=True
    )  # an empty directory is taken
    assert report["max_logit_difference"] == 0
    loaded = load_model(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.generation_config.eos_token_id == loaded.config.eos_token_id == 96


def test_bfloat16_gpt2_exports_as_conv1d_within_its_tolerance(tmp_path: Path) -> None:
    model = build_model(
        GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=64), dtype=torch.bfloat16
    ).eval()
    replace_(model, ffn_rules(model, LowRank(rank=8)))
    report = export(model, None, tmp_path / "out")
    assert 0 < report["max_logit_difference"] < report["tolerance"]
    assert type(load_model(tmp_path / "out").transformer.h[1].mlp.c_fc).__name__ == "Conv1D"


def test_an_export_beyond_the_tolerance_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("lamella.hub.export"), "_verify", lambda *given: 2e-3)
    with pytest.raises(ValueError, match=r"differ by up to 0\.002, more than tolerance=0\.001"):
        export(structured(), None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_fresh_process_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ValueError, match="can't be loaded in a fresh process"):
        export(structured(), None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_wrong_requests_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = structured()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="not empty"):
        export(model, None, tmp_path / "full")
    with pytest.raises(ValueError, match="is a file"):
        export(model, None, tmp_path / "full" / "file")
    with pytest.raises(ValueError, match="tolerance must be"):
        export(model, None, tmp_path / "out", tolerance=0)
    with pytest.raises(ValueError, match="is it another model's"):
        export(structured(vocab_size=50), characters(), tmp_path / "out")
    with pytest.raises(ValueError, match="no structured layers"):
        export(build_model(load_config("tiny")), None, tmp_path / "out", structured=True)
    with pytest.raises(ValueError, match="can't write to"):
        export(model, None, tmp_path / "full" / "file" / "out")
    guide_(model, steps=2)
    with pytest.raises(ValueError, match=r"call remove\(\) on its Guide"):
        export(model, None, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("lamella.hub.export")

    def full(model: PreTrainedModel, tokenizer: object, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(module, "write_directory", full)
    with pytest.raises(ValueError, match="No space left on device"):
        export(structured(), None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
