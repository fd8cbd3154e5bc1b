"""Bits per byte by its definition, and generation."""

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from tokenizers import Tokenizer
from torch import nn
from train_runs import SETTINGS

from lamella.data import DataError, Tokens, austen, encode_text, load_tokenizer, make_tokenizer, prepare
from lamella.hub import export, load_model
from lamella.train import (
    TrainConfig,
    decode_speed,
    evaluate,
    evaluate_path,
    export_run,
    generate,
    open_model,
    train,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return train_runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def run(inputs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    structured = {"structure": "BlockShuffle(num_blocks=4)", "context": 32}
    train(TrainConfig(**SETTINGS | inputs | structured, out=str(out)), progress=False)
    return out


class Uniform(nn.Module):
    """Gives every token the same probability; counts what it is asked."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.vocab, self.asked = vocab, 0

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        self.asked += input_ids.numel()
        return type("Output", (), {"logits": torch.zeros(*input_ids.shape, self.vocab)})


@pytest.mark.parametrize("context", [1, 7, 10, 99, 100, 200])
def test_every_token_but_the_first_is_predicted_once(context: int) -> None:
    ids, num_bytes = encode_text(make_tokenizer("byte"), "a" * 100)
    model = Uniform(256)
    tokens = Tokens(ids, num_bytes=num_bytes, vocab_size=256)
    found = evaluate(model, tokens, context=context, batch_size=3)
    assert model.asked == found.tokens == 99
    assert found.bpb == pytest.approx(8 * 99 / 100)
    assert found.perplexity == pytest.approx(256)


def test_bytes_are_those_of_the_original_text() -> None:
    text = "naïve — “café”\r\n" * 3
    found = evaluate(Uniform(96), text, context=8, tokenizer=make_tokenizer("char"))
    assert found.bytes == len(text.encode())
    assert found.replaced_characters == 0
    assert (
        evaluate(
            Uniform(96), "a?\u4e16\u754c", context=8, tokenizer=make_tokenizer("char")
        ).replaced_characters
        == 2
    )


def test_a_limit_counts_the_bytes_of_what_is_read() -> None:
    tokenizer = make_tokenizer("bpe-300", [austen("validation")[:20_000]])
    text = austen("test")[:3000]
    found = evaluate(Uniform(300), text, context=16, tokenizer=tokenizer, limit_tokens=100)
    ids, _ = encode_text(tokenizer, text)
    assert found.tokens == 100
    assert found.bytes == len(tokenizer.decode(ids[:101].tolist()).encode())


def test_batching_does_not_change_the_result(run: Path, inputs: dict[str, str]) -> None:
    model, tokenizer, _ = open_model(run)
    text = austen("test")[:3000]
    one, many = (evaluate(model, text, context=32, tokenizer=tokenizer, batch_size=b) for b in (1, 64))
    assert one.nll_nats == pytest.approx(many.nll_nats, rel=1e-6)
    assert not model.training


def test_plain_transformers_gives_the_same_bpb(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(austen("test")[:6000] + "\r\nna\u00efve \u2014 end", encoding="utf-8", newline="")
    folder = tmp_path / "export"
    report = export_run(run, folder)
    assert report["of"] == str(run / "model")
    own = evaluate_path(folder, text)
    documentation = sys.modules["lamella.train.evaluate"].__doc__ or ""
    script = textwrap.dedent(documentation[documentation.index("    import math") :])
    (tmp_path / "lamella.py").write_text("raise ImportError('lamella is not here')")
    (tmp_path / "score.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(tmp_path / "score.py"), str(folder), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert float(done.stdout) == pytest.approx(own.bpb, abs=1e-4)
    assert evaluate_path(run, text).bpb == pytest.approx(own.bpb, abs=1e-4)


def test_a_run_a_checkpoint_and_a_dataset_agree(run: Path, inputs: dict[str, str]) -> None:
    text = Path(inputs["data"]).parent / "validation.txt"
    found = evaluate_path(run, text)
    checkpoint = max((run / "checkpoints").iterdir())
    for path, what in (
        (checkpoint, text),
        (run, inputs["data"]),
        (run, Path(inputs["data"]) / "validation.bin"),
    ):
        assert evaluate_path(path, what).bpb == pytest.approx(found.bpb, rel=1e-6)
    assert evaluate_path(run, inputs["data"], split="test").bytes == 3000
    assert evaluate_path(run, text, limit_tokens=50).tokens == 50


def test_what_cannot_be_scored_is_refused(run: Path, inputs: dict[str, str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some text.\n" * 400)
    prepare([text], tmp_path / "bytes", "byte")
    with pytest.raises(DataError, match="was tokenised by 'byte', which is not the model's tokenizer"):
        evaluate_path(run, tmp_path / "bytes")
    with pytest.raises(DataError, match="has no nothing split"):
        evaluate_path(run, Path(inputs["data"]) / "nothing.bin")
    with pytest.raises(ValueError, match="a vocabulary of 256 tokens and the model one of 96"):
        evaluate(load_model(run), "text", context=8, tokenizer=make_tokenizer("byte"))
    with pytest.raises(ValueError, match="is not a folder"):
        evaluate_path(tmp_path / "none", text)
    text.write_text("x")
    with pytest.raises(ValueError, match="at least 2"):
        evaluate_path(run, text)
    text.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"binary|UTF-8"):
        evaluate_path(run, text)


def test_generation_is_seeded_streamed_and_outgrows_the_context(run: Path) -> None:
    pieces: list[str] = []
    text = generate(run, "It is a truth", max_new_tokens=70, seed=3, stream=pieces.append)
    assert "".join(pieces) == text
    assert len(text) == 70  # the char tokenizer: one character a token; the context is 32
    assert len(pieces) == 70
    assert generate(run, "It is a truth", max_new_tokens=70, seed=3) == text
    assert generate(run, "It is a truth", max_new_tokens=70, seed=4) != text
    assert len(generate(run, "x" * 500, max_new_tokens=5)) == 5


def test_temperature_zero_is_the_likeliest_token_each_time(run: Path) -> None:
    model, tokenizer, _ = open_model(run)
    ids = encode_text(tokenizer, "It is")[0].tolist()
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    expected = tokenizer.decode(ids[-12:])
    assert generate(model, "It is", tokenizer=tokenizer, max_new_tokens=12, temperature=0.0) == expected


def test_an_empty_prompt_stands_for_a_line_end_and_the_random_state_stays(run: Path) -> None:
    before = torch.get_rng_state()
    assert generate(run, "", max_new_tokens=8) == generate(run, "\n", max_new_tokens=8)
    assert torch.equal(before, torch.get_rng_state())


def test_characters_of_several_tokens_are_streamed_whole() -> None:
    from lamella.train.generate import _Pieces

    tokenizer: Tokenizer = make_tokenizer("byte")
    pieces: list[str] = []
    streamer = _Pieces(tokenizer, pieces.append)
    for byte in "é—x".encode():
        streamer.put(torch.tensor([byte]))
    assert pieces == ["é", "—", "x"]
    assert streamer.finish() == "é—x"


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
    ],
)
def test_bad_sampling_settings_are_refused(run: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.*: it must be"):
        generate(run, "x", **settings)


def test_decode_speed_is_tokens_per_second(run: Path) -> None:
    model, _, _ = open_model(run)
    assert decode_speed(model, 2, 8, repeats=1) > 0
    with pytest.raises(ValueError, match="below the model's context"):
        decode_speed(model, 1, 32)


def test_a_pickle_is_refused(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((run / "model" / name).read_bytes())
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        evaluate_path(folder, tmp_path / "text.txt")


def test_the_exported_tokenizer_is_the_runs_own(run: Path, tmp_path: Path) -> None:
    model, tokenizer, _ = open_model(run)
    export(model, tokenizer, tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").encode("Emma").ids == tokenizer.encode("Emma").ids
