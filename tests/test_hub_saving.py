"""save_pretrained and from_pretrained of structured models."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lamella import (
    BTT,
    BlockDense,
    BlockShuffle,
    Dense,
    Einsum,
    Kronecker,
    LowRank,
    Structure,
    StructuredLinear,
    TensorTrain,
    guide_,
    merge_,
    replace_,
)
from lamella.hub import build_model, ffn_rules, load_config, load_model
from lamella.hub.quiet import no_progress_bars
from lamella.structures.text import FAMILIES

STRUCTURES: list[Structure] = [
    Dense(),
    LowRank(rank=8),
    LowRank(rank_frac=0.25),
    BlockDense(num_blocks=2, rank=8),
    BlockShuffle(num_blocks=2),
    BTT(rho=2),
    Kronecker(),
    TensorTrain(rho=2),
    Einsum(
        sizes={"alpha": 5, "gamma": 7, "epsilon": 6, "phi": 6, "rho": 2}
    ),  # 35 and 36 where a layer has 32
]
IDS = torch.arange(24).reshape(2, 12)


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with no_progress_bars():
        yield


def tiny(**overrides: object) -> PreTrainedConfig:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    return load_config("tiny", **{**sizes, **overrides})


def structured(structure: Structure = BTT(), config: PreTrainedConfig | None = None) -> PreTrainedModel:  # noqa: B008
    if config is None:
        config = tiny(intermediate_size=32) if isinstance(structure, Einsum) else tiny()
    model = build_model(config).eval()
    replace_(model, ffn_rules(model, structure))
    for parameter in model.parameters():  # nothing stays at a value that an initialisation could give
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    output = model(IDS)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


CHILD = """
import sys, lamella.hub
from pathlib import Path
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM
for folder in sorted(Path(sys.argv[1]).iterdir()):
    auto = AutoModel if folder.name.endswith("bert") else AutoModelForCausalLM
    model = auto.from_pretrained(folder)
    output = model(torch.arange(24).reshape(2, 12))
    found = output.logits if "logits" in output else output.last_hidden_state
    wrong = [n for n, t in load_file(folder / "model.safetensors").items() if not torch.equal(t, model.state_dict()[n])]
    print(folder.name, torch.equal(found, load_file(folder / "expected.st")["logits"]), wrong)
"""


def test_every_family_reloads_exactly_in_a_fresh_process(tmp_path: Path) -> None:
    assert {type(s) for s in STRUCTURES} == set(FAMILIES.values())
    models = {f"{k}-{type(s).__name__}": structured(s) for k, s in enumerate(STRUCTURES)}
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 32}
    models["gpt2"] = structured(config=GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=32))
    models["untied"] = structured(config=tiny(tie_word_embeddings=False))
    bert = BertConfig(**sizes, intermediate_size=64, architectures=["BertModel"])
    models["bert"] = structured(config=bert)
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        save_file({"logits": logits(model)}, tmp_path / name / "expected.st")
    command = [sys.executable, "-W", "error", "-c", CHILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} True []" for name in sorted(models)]


def test_a_reloaded_model_says_nowhere_that_it_is_quantised(tmp_path: Path) -> None:
    structured().save_pretrained(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert not model.is_quantized
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model, "quantization_method")
    assert not any(getattr(m.config, "_is_quantized", False) for m in model.modules() if hasattr(m, "config"))
    expected = logits(model)
    assert torch.equal(logits(model.half().float().to(torch.float32)), logits(model))
    again = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path / "first"))
    again.save_pretrained(tmp_path / "second")
    assert torch.equal(logits(load_model(tmp_path / "second")), expected)
    assert (tmp_path / "first" / "config.json").read_text() == (
        tmp_path / "second" / "config.json"
    ).read_text()


def test_trainer_takes_a_reloaded_model(tmp_path: Path) -> None:
    structured().save_pretrained(tmp_path)
    model = load_model(tmp_path)
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments)
    trainer.save_model(str(tmp_path / "again"))
    assert torch.equal(logits(load_model(tmp_path / "again")), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_reaches_every_factor_and_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    model = structured()
    model.save_pretrained(tmp_path / "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    for name, tensor in model.to(dtype).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    loaded.save_pretrained(tmp_path / "cast")
    assert load_model(tmp_path / "cast").dtype == dtype


def test_tied_embeddings_stay_tied_and_are_stored_once(tmp_path: Path) -> None:
    structured().save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_the_bare_model_loads_from_a_causal_lm_directory(tmp_path: Path) -> None:
    model = structured()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModel.from_pretrained(tmp_path)), model.model(IDS).last_hidden_state)


def test_sharded_checkpoints_round_trip(tmp_path: Path) -> None:
    model = structured()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load_model(tmp_path)), logits(model))
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(ValueError, match="names files that are missing"):
        load_model(tmp_path)


def test_a_merged_model_is_plain_again(tmp_path: Path) -> None:
    for config in (tiny(), GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=32)):
        model = structured(config=config)
        expected = logits(model)
        merge_(model)
        assert not hasattr(model.config, "quantization_config")
        model.save_pretrained(tmp_path / config.model_type)
        assert "quantization_config" not in json.loads(
            (tmp_path / config.model_type / "config.json").read_text()
        )
        loaded = load_model(tmp_path / config.model_type)
        assert not any(isinstance(m, StructuredLinear) for m in loaded.modules())
        # float32: one merged product against two, each rounded
        torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


def test_models_made_from_one_config_object_do_not_share_structures(tmp_path: Path) -> None:
    config = tiny()
    kind = type(build_model(config))
    dense, changed = kind(config), kind(config)
    replace_(changed, ffn_rules(changed, BTT()))
    assert not hasattr(dense.config, "quantization_config")
    assert changed.model.layers[0].self_attn.config is changed.config
    dense.save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tmp_path)), logits(dense.eval()))


def test_building_from_a_structured_config_gives_the_structures(tmp_path: Path) -> None:
    structured(LowRank(rank=8)).save_pretrained(tmp_path)
    built = build_model(load_config(tmp_path), "meta")
    assert built.get_submodule("model.layers.1.mlp.c_fc").structure == LowRank(rank=8)


C_FC = "model.layers.1.mlp.c_fc"
Change = Callable[[dict[str, torch.Tensor]], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "missing factor": (lambda t: t.pop(f"{C_FC}.factors.1"), rf"missing: {C_FC}\.factors\.1"),
    "missing bias": (lambda t: t.pop(f"{C_FC}.bias"), rf"missing: {C_FC}\.bias"),
    "extra factor": (lambda t: t.update({f"{C_FC}.factors.2": torch.ones(1)}), rf"extra: {C_FC}\.factors\.2"),
    "extra weight": (lambda t: t.update({f"{C_FC}.weight": torch.ones(1)}), rf"extra: {C_FC}\.weight"),
    "extra guide": (lambda t: t.update({f"{C_FC}.guide": torch.ones(1)}), rf"extra: {C_FC}\.guide"),
    "factor of a layer not named": (
        lambda t: t.update({"model.layers.0.mlp.c_fc.factors.0": torch.ones(1)}),
        r"extra: model\.layers\.0\.mlp\.c_fc\.factors\.0",
    ),
    "misshapen factor": (
        lambda t: t.update({f"{C_FC}.factors.0": torch.ones(1, 2, 3)}),
        rf"misshapen: {C_FC}\.factors\.0 is \(1, 2, 3\), not",
    ),
    "misshapen bias": (lambda t: t.update({f"{C_FC}.bias": torch.ones(3)}), rf"misshapen: {C_FC}\.bias"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("bare", [False, True], ids=["causal", "bare"])
def test_keys_that_do_not_fit_are_errors_that_name_them(tmp_path: Path, change: str, bare: bool) -> None:
    structured().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    alter, message = CHANGES[change]
    alter(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if bare:  # expected keys lack the prefix there
        message = message.replace("missing: model.", "missing: ").replace("misshapen: model.", "misshapen: ")
    with pytest.raises(ValueError, match=message):
        (AutoModel if bare else AutoModelForCausalLM).from_pretrained(tmp_path)


def edited(folder: Path, **entries: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(entries)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"format_version": 2}, "upgrade lamella"),
        ({"format_version": "x"}, "upgrade lamella"),
        ({"layers": {C_FC: "LowRnk(rank=8)"}}, "did you mean 'LowRank'"),
        ({"layers": {"model.layers.9.mlp.c_fc": "BTT()"}}, r"layers Starcoder2ForCausalLM doesn't have"),
        ({"layers": {C_FC: "LowRank(rank=999)"}}, "does not fit 32 -> 64"),
        ({"surprise": 1}, "unknown entries"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_an_error(
    tmp_path: Path, entries: dict[str, object], message: str
) -> None:
    structured().save_pretrained(tmp_path)
    edited(tmp_path, **entries)
    for load in (AutoModelForCausalLM.from_pretrained, load_model):
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_pickled_and_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = structured()
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or no safetensors"):
        load_model(tmp_path)
    weights.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="Pickles"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="not a directory"):
        load_model(tmp_path / "nowhere")


def test_our_loader_refuses_other_keys_in_dense_models_too(tmp_path: Path) -> None:
    build_model(tiny()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["stray"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: model\.norm\.weight; unexpected keys: stray"):
        load_model(tmp_path)


def test_a_run_folder_stands_for_its_finished_model(tmp_path: Path) -> None:
    model = structured()
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(logits(load_model(tmp_path)), logits(model))


def test_a_guided_model_is_refused_until_its_guide_is_removed(tmp_path: Path) -> None:
    model = structured()
    guide = guide_(model, steps=2)
    with pytest.raises(ValueError, match=r"call remove\(\) on its Guide"):
        model.save_pretrained(tmp_path / "guided")
    assert not (tmp_path / "guided").exists()
    guide.remove()
    model.save_pretrained(tmp_path / "free")
    assert torch.equal(logits(load_model(tmp_path / "free")), logits(model))


@pytest.fixture
def foreign() -> object:
    """Another quantisation method, which marks the models that it processes."""
    method = "another-method"

    @register_quantization_config(method)
    class Config(QuantizationConfigMixin):
        def __init__(self, bits: int = 8, quant_method: str = method) -> None:
            self.quant_method, self.bits = method, bits

    @register_quantizer(method)
    class Quantizer(HfQuantizer):
        def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
            model.processed = "before"

        def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
            model.processed += " and after"

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    yield Config
    del AUTO_QUANTIZATION_CONFIG_MAPPING[method], AUTO_QUANTIZER_MAPPING[method]


def test_another_quantisation_config_is_nested_and_restored(tmp_path: Path, foreign: type) -> None:
    model = structured()
    merge_(model)
    model.config.quantization_config = foreign(bits=4)
    replace_(model, ffn_rules(model, BTT()))
    model.save_pretrained(tmp_path / "first")
    saved = json.loads((tmp_path / "first" / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "lamella"
    assert saved["inner"]["bits"] == 4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert loaded.processed == "before and after"
    assert loaded.is_quantized  # the other method's doing
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "second")
    assert json.loads((tmp_path / "second" / "config.json").read_text())["quantization_config"] == saved
    merge_(loaded)
    assert loaded.config.quantization_config.bits == 4
