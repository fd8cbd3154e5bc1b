"""The command line: what people type, and what they mistype."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_runs import SETTINGS, make_inputs

import lamella
from lamella.cli import main


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def train_words(inputs: dict[str, str]) -> list[str]:
    settings = SETTINGS | inputs | {"steps": 8}
    return ["train", *(f"--{name}={value}" for name, value in settings.items())]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train_words: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("run") / "r"
    assert (
        main([*train_words, f"--out={folder}", "--structure", "LowRank(rank=4)", "--all-blocks", "--guide"])
        == 0
    )
    return folder


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a command that must exit with 2 and no traceback."""
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err
    assert code == 2, (words, code, message)
    assert "Traceback" not in message
    return message


def test_version_and_help_are_quick_and_need_no_transformers() -> None:
    code = (
        "import sys; from lamella.cli import main; main(['--version']); main([]); "
        "assert not {'transformers', 'matplotlib'} & set(sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith(f"lamella {lamella.__version__}")
    assert "compare" in out


@pytest.mark.parametrize(
    "verb", ["train", "compare", "eval", "generate", "export", "info", "prepare", "bench"]
)
def test_every_verb_explains_every_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    options = [line for line in shown.split("options:")[1].splitlines() if line.startswith("  --")]
    assert options
    text = " ".join(shown.split("options:")[1].split())
    for line in options:
        name = line.split()[0]
        described = text.split(f" {name} ", 1)[1].replace(f"{name}+ [ITEM,...]", "").split(" --", 1)[0]
        words = [word for word in described.split("(")[0].split() if word.islower()]
        assert words, f"{verb} {name} is not explained: {described}"


def test_a_run_is_trained_evaluated_continued_and_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged.\n" * 20)
    capsys.readouterr()
    assert "batch_size" in refused(capsys, "eval", str(run), "--text", str(text), "--batch-size", "-1")
    assert "limit_tokens" in refused(capsys, "eval", str(run), "--text", str(text), "--limit-tokens", "0")
    assert main(["eval", str(run), "--text", str(text), "--json"]) == 0
    scored = last_json(capsys)
    assert 0 < scored["bpb"] < 20
    assert scored["bytes"] == text.stat().st_size

    assert main(["generate", str(run), "--prompt", "It was ", "--max-new-tokens", "20", "--json"]) == 0
    assert last_json(capsys)["prompt"] == "It was "

    out = tmp_path / "export"
    assert main(["export", str(run), "--out", str(out), "--json"]) == 0
    assert last_json(capsys)["max_logit_difference"] < 1e-3
    assert main(["eval", str(out), "--text", str(text), "--json"]) == 0
    assert last_json(capsys)["bpb"] == pytest.approx(scored["bpb"], abs=1e-5)
    assert "exists" in refused(capsys, "export", str(run), "--out", str(out))

    assert main(["export", str(run), "--out", str(tmp_path / "kept"), "--structured"]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "kept"), "--text", str(text), "--json"]) == 0
    assert last_json(capsys)["bpb"] == pytest.approx(scored["bpb"], abs=1e-6)


def test_a_finished_run_resumed_returns_its_result_and_a_changed_option_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--json"]) == 0
    assert last_json(capsys)["steps"] == 8
    message = refused(capsys, "train", "--resume", str(run), "--lr", "0.5")
    assert "lr: given 0.5, stored 0.01" in message
    message = refused(capsys, "train", "--resume", str(run), "--out", str(run.parent / "other"))
    assert "can't be another" in message


@pytest.mark.parametrize("file", ["config.yaml", "the model's config.json"])
def test_a_run_whose_settings_were_edited_is_not_resumed(
    file: str, run: Path, inputs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(inputs["model"], tmp_path / "model")
    settings = SETTINGS | inputs | {"steps": 8, "model": str(model), "out": str(tmp_path / "r")}
    assert main(["train", *(f"--{name}={value}" for name, value in settings.items())]) == 0
    (tmp_path / "r" / "result.json").unlink()
    path = tmp_path / "r" / "config.yaml" if file == "config.yaml" else model / "config.json"
    old, new = ("lr: 0.01", "lr: 0.02") if file == "config.yaml" else ('"gelu"', '"relu"')
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    capsys.readouterr()
    message = refused(capsys, "train", "--resume", str(tmp_path / "r"))
    assert "written with other settings" in message
    assert new.split()[-1].strip('"') in message


def test_info_is_the_same_from_a_preset_and_from_its_config_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lamella.hub import load_config

    load_config("tiny").save_pretrained(tmp_path)
    totals = []
    for model in ("tiny", str(tmp_path), str(tmp_path / "config.json")):
        assert main(["info", "--model", model, "--structure", "LowRank(rank=32)", "--json"]) == 0
        totals.append({k: v for k, v in last_json(capsys).items() if k not in ("model", "layers")})
    assert totals[0] == totals[1] == totals[2]


def test_prepared_text_trains(
    tmp_path: Path, inputs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    data = tmp_path / "data"
    words = [
        "prepare",
        str(text),
        "--out",
        str(data),
        "--tokenizer",
        "char",
        "--validation-frac",
        "0.1",
        "--json",
    ]
    assert main([*words, "--test-frac", "0.1"]) == 0
    assert last_json(capsys)["splits"]["train"]["tokens"] > 1000
    settings = SETTINGS | {"model": inputs["model"], "data": str(data), "steps": 2}
    assert main(["train", *(f"--{k}={v}" for k, v in settings.items()), f"--out={tmp_path / 'r'}"]) == 0


BAD = [
    (["trane"], "did you mean 'train'"),
    (["train", "--structre", "BTT()", "--out", "OUT"], "did you mean '--structure'"),
    (["train", "--structure", "LowRnk(rank=3)", "--out", "OUT"], "did you mean 'LowRank'"),
    (["train", "--structure", "LowRank(rnk=3)", "--out", "OUT"], "did you mean 'rank'"),
    (["train", "--structure", "BlockShuffle(num_blocks=5)", "--out", "OUT"], "Valid: 1, 2, 4, 8"),
    (["train", "--model", "tinny", "--out", "OUT"], "did you mean 'tiny'"),
    (["train", "--steps", "0", "--out", "OUT"], "steps"),
    (["train", "--lr", "-1", "--out", "OUT"], "lr"),
    (["train", "--batch-size", "0", "--out", "OUT"], "batch_size"),
    (["train", "--steps", "many", "--out", "OUT"], "steps"),
    (["train", "--data", "nowhere", "--out", "OUT"], "nowhere"),
    (["train", "--rules", '{"*.nothing": "BTT()"}', "--out", "OUT"], "matches no linear layer"),
    (["train", "--guide", "--out", "OUT"], "no effect without"),
    (["train", "--out", "/proc/lamella"], "/proc/lamella"),
    (["train", "--resume", "OUT"], "not a run folder"),
    (["train"], "out"),
    (["compare", "--variants", "dense", "narow", "--out", "OUT"], "did you mean 'narrow'"),
    (["compare", "--variants", "dense", "--steps", "-3", "--out", "OUT"], "steps"),
    (["eval", "OUT", "--text", "TEXT"], "OUT"),
    (["eval", "OUT"], "text"),
    (["info", "--strcture", "BTT()"], "did you mean '--structure'"),
    (["generate", "OUT"], "OUT"),
    (["train", "--device", "meta", "--out", "OUT"], "device"),
    (["train", "--ffn_width", "99999999999999999999", "--out", "OUT"], "ffn_width"),
    (["compare", "--variants", "dense", "--guide_frac", "0.2", "--out", "OUT"], "no effect"),
    (["bench", "--width", "16", "--tokens", "99999999999", "--rounds", "2"], "memory"),
    (["export", "OUT", "--out", "OUT2"], "OUT"),
    (["info", "--model", "xxl"], "did you mean 'xl'"),
    (["info", "--structure", "BTT(gamma=7)"], "gamma must divide"),
    (["info", "--all-blocks"], "no effect"),
    (["prepare", "nothing.txt", "--out", "OUT"], "nothing.txt"),
    (["prepare", "--out", "OUT"], "files"),
    (["bench", "--width", "0"], "width"),
    (["bench", "--dtype", "int8"], "dtype"),
]


@pytest.mark.parametrize(
    ("words", "part"), BAD, ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else ""
)
def test_bad_input_exits_with_2_and_says_what_would_be_right(
    words: list[str],
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TEXT").write_text("some text\n" * 10)
    assert part in refused(capsys, *words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["TEXT"], "something was left behind"


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"", "empty"), (b"a\x00b" * 50, "binary"), (b"caf\xe9 au lait\n" * 50, "UTF-8")],
)
def test_text_that_is_no_text_is_refused_by_prepare_and_eval(
    content: bytes, part: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    assert part in refused(capsys, "prepare", str(bad), "--out", str(tmp_path / "data"))
    assert part in refused(capsys, "eval", str(run), "--text", str(bad))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.txt"]


def test_a_pickle_of_weights_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lamella.hub import load_config

    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    load_config("tiny").save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 10)
    assert "pickle" in refused(capsys, "eval", str(tmp_path / "m"), "--text", str(text))
    assert not (tmp_path / "sprung").exists()


def test_a_learning_rate_that_breaks_the_loss_stops_with_advice(
    train_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, *train_words, "--lr=1e30", "--warmup_frac=0", f"--out={tmp_path / 'r'}")
    assert "lower learning rate" in message


def test_the_module_runs_as_the_command_does() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "lamella", "--version"], capture_output=True, text=True, check=True
    )
    assert out.stdout == f"lamella {lamella.__version__}\n"
