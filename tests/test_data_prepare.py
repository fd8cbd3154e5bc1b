"""Dataset folders: made by prepare, opened by open_dataset."""

import hashlib
import json
import lzma
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.data import DataError, austen, encode_text, open_dataset, prepare
from lamella.data import text as text_module
from lamella.data.corpus import SPLITS
from lamella.data.prepare import Source, _line_start, _slice

TEXT = austen("test")[:60_000]


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    return path


def text_of(dataset, split):
    return dataset.tokenizer.decode(getattr(dataset, split).ids.tolist())


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("spec", ["char", "byte", "bpe-400"])
def test_splits_are_the_text_cut_where_lines_start(tmp_path, book, spec):
    summary = prepare([book], tmp_path / "out", spec, validation_frac=0.1, test_frac=0.2)
    dataset = open_dataset(tmp_path / "out")
    train, test, validation = (text_of(dataset, split) for split in ("train", "test", "validation"))
    assert train + test + validation == TEXT
    assert train.endswith("\n")
    assert test.endswith("\n")
    assert 0.05 < len(validation) / len(TEXT) <= 0.1
    assert 0.15 < len(test) / len(TEXT) < 0.25
    assert dataset.train.num_bytes == len(train.encode())
    assert dataset.tokenizer_spec == spec
    assert dataset.digest == summary["digest"]


def test_default_is_one_percent_validation_after_one_percent_test(tmp_path, book):
    splits = prepare([book], tmp_path / "out", "byte")["splits"]
    assert 200 < splits["validation"]["bytes"] <= 600
    assert 400 < splits["test"]["bytes"] < 800
    assert splits["train"]["sources"][0]["stop"] == splits["test"]["sources"][0]["start"]
    assert splits["test"]["sources"][0]["stop"] == splits["validation"]["sources"][0]["start"]


def test_given_files_are_the_splits_and_nothing_is_cut_from_train(tmp_path, book):
    (tmp_path / "v.txt.xz").write_bytes(lzma.compress("Väl.\n".encode()))
    summary = prepare([book], tmp_path / "out", "byte", validation_files=[tmp_path / "v.txt.xz"])
    dataset = open_dataset(tmp_path / "out")
    assert "test" not in summary["splits"]
    assert dataset.test is None
    assert text_of(dataset, "validation") == "Väl.\n"
    assert text_of(dataset, "train") == TEXT


def test_test_files_leave_the_default_validation(tmp_path, book):
    (tmp_path / "t.txt").write_text("Test.\n")
    prepare([book], tmp_path / "out", "byte", test_files=[tmp_path / "t.txt"])
    dataset = open_dataset(tmp_path / "out")
    assert text_of(dataset, "test") == "Test.\n"
    assert text_of(dataset, "train") + text_of(dataset, "validation") == TEXT


def test_files_are_joined_in_order_and_no_token_spans_two(tmp_path):
    for name, text in (("a", "one word"), ("b", "word two\n" * 9)):
        (tmp_path / f"{name}.txt").write_text(text)
    summary = prepare(
        [tmp_path / "a.txt", tmp_path / "b.txt"],
        tmp_path / "out",
        "bpe-258",
        validation_frac=0.3,
        test_frac=0,
    )
    dataset = open_dataset(tmp_path / "out")
    assert text_of(dataset, "train") + text_of(dataset, "validation") == "one word" + "word two\n" * 9
    assert [source["start"] for source in summary["splits"]["train"]["sources"]] == [0, 0]
    first, _ = encode_text(dataset.tokenizer, "one word")
    assert dataset.train.ids[: len(first)].tolist() == first.tolist()


def test_the_same_text_gives_the_same_dataset_in_memory_in_a_folder_and_again(tmp_path):
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_text(austen(split), encoding="utf-8", newline="")
    files = {f"{split}_files": [tmp_path / f"{split}.txt"] for split in ("validation", "test")}
    memory = open_dataset("austen", "byte")
    for out in ("a", "b"):
        prepare([tmp_path / "train.txt"], tmp_path / out, "byte", **files)
        assert open_dataset(tmp_path / out).digest == memory.digest
    assert (tmp_path / "a/dataset.json").read_bytes() == (tmp_path / "b/dataset.json").read_bytes()


def test_dataset_json_describes_the_files(tmp_path, book):
    prepare([book], tmp_path / "out", "bpe-300")
    content = json.loads((tmp_path / "out/dataset.json").read_text())
    assert content["tokenizer"]["vocab_size"] == 300
    for split, facts in content["splits"].items():
        data = (tmp_path / "out" / f"{split}.bin").read_bytes()
        assert facts["sha256"] == hashlib.sha256(data).hexdigest()
        assert facts["tokens"] == len(np.frombuffer(data, "<u2"))
        assert facts["dtype"] == "<u2"


def test_progress_runs_from_zero_to_all_bytes(tmp_path, book):
    seen = []
    prepare([book], tmp_path / "out", "byte", progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, len(TEXT.encode()))
    assert seen[-1] == (len(TEXT.encode()), len(TEXT.encode()))
    assert seen == sorted(seen)


@given(parts=st.lists(st.text("ab\n", min_size=1, max_size=12), min_size=1, max_size=4), data=st.data())
@settings(max_examples=60)
def test_line_starts_and_slices_match_the_joined_text(tmp_path_factory, parts, data):
    folder = tmp_path_factory.mktemp("parts")
    sources = []
    for i, part in enumerate(parts):
        (folder / f"{i}.txt").write_text(part, newline="")
        sources.append(Source(folder / f"{i}.txt", 0, len(part)))
    joined = "".join(parts)
    target = data.draw(st.integers(0, len(joined)))
    file_starts = {0, len(joined)} | {len("".join(parts[:i])) for i in range(len(parts))}
    line_starts = {i for i in range(1, len(joined)) if joined[i - 1] == "\n"}
    assert _line_start(sources, target) == min(i for i in file_starts | line_starts if i >= target)
    stop = data.draw(st.integers(target, len(joined)))
    pieces = _slice(sources, target, stop)
    assert "".join(block for piece in pieces for block in piece.blocks()) == joined[target:stop]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": []}, "no files are given"),
        ({"files": "book.txt"}, "is one path; give a list"),
        ({"files": ["nothing.txt"]}, "nothing.txt does not exist"),
        ({"files": ["book.txt", "empty.txt"]}, "empty.txt is empty"),
        ({"files": ["book.txt", "binary.txt"]}, "NUL byte"),
        ({"tokenizer": "bpe4096"}, "Did you mean 'bpe-4096'"),
        ({"tokenizer": "bpe-60000"}, "the text is too small for 'bpe-60000'"),
        ({"validation_frac": 0}, "validation_frac=0: it must be above 0"),
        ({"validation_frac": 1.5}, "validation_frac=1.5"),
        ({"validation_frac": float("nan")}, "validation_frac=nan"),
        ({"test_frac": -0.1}, "test_frac=-0.1"),
        ({"validation_frac": 0.5, "test_frac": 0.5}, "leave nothing to train on"),
        ({"validation_files": ["v.txt"], "validation_frac": 0.1}, "are both given"),
        ({"validation_files": ["book.txt"]}, "book.txt is given for both train and validation"),
        ({"validation_files": ["one.txt"], "tokenizer": "byte"}, "validation split has 1 tokens"),
        ({"files": ["one.txt"]}, "too few lines to cut"),
        ({"out": "book.txt"}, "is a file. Give a folder"),
        ({"out": "book.txt/out"}, "cannot be made"),
        ({"out": "full"}, "is not empty and no dataset folder"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_left(tmp_path, book, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    for name, text in {"empty": "", "binary": "a\0b", "v": "val\n", "one": "1"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.md").write_text("mine")
    before = left_in(tmp_path)
    with pytest.raises(DataError, match=message):
        prepare(**{"files": ["book.txt"], "out": "out", "tokenizer": "bpe-300", **change})
    assert left_in(tmp_path) == before
    assert left_in(tmp_path / "full") == ["notes.md"]


def test_a_finished_dataset_is_replaced_only_when_asked(tmp_path, book):
    out = tmp_path / "out"
    first = prepare([book], out, "byte")
    with pytest.raises(DataError, match="overwrite"):
        prepare([book], out, "char")
    assert open_dataset(out).digest == first["digest"]
    prepare([book], out, "char", overwrite=True)
    assert open_dataset(out).tokenizer_spec == "char"
    assert left_in(tmp_path) == ["book.txt", "out"]
    (out / "notes.md").write_text("mine")
    with pytest.raises(DataError, match=r"more than a dataset: notes.md"):
        prepare([book], out, "byte", overwrite=True)
    assert (out / "notes.md").read_text() == "mine"


def test_an_empty_folder_may_be_the_target(tmp_path, book):
    (tmp_path / "out").mkdir()
    prepare([book], tmp_path / "out", "byte")
    assert left_in(tmp_path) == ["book.txt", "out"]


def test_an_interrupt_leaves_nothing(tmp_path, book):
    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([book], tmp_path / "out", "byte", progress=interrupt)
    assert left_in(tmp_path) == ["book.txt"]


def run_aside(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_kill_leaves_no_dataset_and_the_next_call_cleans_up_but_spares_running_ones(tmp_path, book):
    code = """
        import sys, time
        from lamella.data import prepare
        def stall(done, total):
            if done:
                print("working", flush=True)
                time.sleep(60)
        prepare([sys.argv[1]], sys.argv[2], "byte", progress=stall)
    """
    out = tmp_path / "out"
    with run_aside(code, book, out) as killed, run_aside(code, book, out) as running:
        assert killed.stdout.readline() == running.stdout.readline() == "working\n"
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert not out.exists()
        assert len(list(tmp_path.glob(".out.partial-*"))) == 2
        prepare([book], out, "byte")
        assert len(list(tmp_path.glob(".out.partial-*"))) == 1
        running.kill()
    prepare([book], out, "byte", overwrite=True)
    assert left_in(tmp_path) == ["book.txt", "out"]
    assert text_of(open_dataset(out), "train") in TEXT


def test_no_more_of_the_text_is_held_than_a_few_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(text_module.chunks, "__defaults__", (10_000,))
    peaks = {}
    for copies in (6, 18):
        path = tmp_path / f"{copies}.txt"
        path.write_text(TEXT * copies, newline="")
        tracemalloc.start()
        prepare([path], tmp_path / str(copies), "byte")
        peaks[copies] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # The text grows by 720 kB and its tokens by 1.4 MB.
    assert peaks[18] < peaks[6] + 100_000, peaks


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_does_not_grow_with_the_text(tmp_path):
    code = """
        import re, sys
        from pathlib import Path
        from lamella.data import prepare
        prepare([sys.argv[1]], sys.argv[2], "byte")
        # Not ru_maxrss, which starts from the parent process's.
        print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
    """
    peaks = {}
    for copies in (2, 20):
        path = tmp_path / f"{copies}.txt.xz"
        path.write_bytes(lzma.compress((austen("train") * copies).encode(), preset=0))
        with run_aside(code, path, tmp_path / str(copies)) as process:
            peaks[copies] = int(process.communicate()[0]) / 1024
    assert peaks[20] < peaks[2] + 40, peaks  # MB; the text grows by 56 MB and its tokens by 112 MB


def test_the_text_a_tokenizer_is_trained_on_is_bounded(tmp_path, book, monkeypatch):
    module = sys.modules["lamella.data.prepare"]
    monkeypatch.setattr(module, "SAMPLE_BYTES", 20_000)
    pieces = "".join(module._sample([Source(book, 0, len(TEXT))]))
    assert TEXT.startswith(pieces)
    assert 20_000 <= len(pieces) < len(TEXT)


def test_austen_opens_with_a_bpe_of_its_own_in_seconds():
    started = time.process_time()
    dataset = open_dataset("austen")
    assert time.process_time() - started < 15  # CPU seconds, whatever else the machine does; about 2 here
    assert dataset.tokenizer_spec == "bpe-1024"
    assert text_of(dataset, "validation") == austen("validation")
    assert dataset.test.num_bytes == len(austen("test").encode())


def test_opening_what_is_no_dataset_says_what_would_be_right(tmp_path, book):
    with pytest.raises(DataError, match=r"Did you mean 'austen'\?.*lamella prepare FILES"):
        open_dataset("austin")
    with pytest.raises(DataError, match="is a file; a dataset is a folder"):
        open_dataset(book)
    with pytest.raises(DataError, match=r"has no dataset.json"):
        open_dataset(tmp_path)


def test_another_tokenizer_than_the_folders_is_refused_naming_both(tmp_path, book):
    prepare([book], tmp_path / "out", "byte")
    assert open_dataset(tmp_path / "out", "byte").vocab_size == 256
    with pytest.raises(DataError, match="tokenized with 'byte', but 'char' was asked for"):
        open_dataset(tmp_path / "out", "char")
    with pytest.raises(DataError, match="unknown tokenizer"):
        open_dataset(tmp_path / "out", "chars")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train.bin", lambda data: data[:-3], "it is cut short or was changed"),
        ("test.bin", None, r"test.bin is missing"),
        ("dataset.json", lambda data: data[:50], "is damaged"),
        ("dataset.json", lambda data: data.replace(b'"sha256"', b'"sha"'), "is damaged"),
        ("dataset.json", lambda data: data.replace(b'"validation": {', b'"val": {'), "is damaged"),
        ("dataset.json", lambda data: data.replace(b'"<u2"', b'"float99"'), "is damaged"),
        ("dataset.json", lambda data: data.replace(b'"format": 1', b'"format": 9'), "has format 9"),
        ("tokenizer.json", lambda data: data.replace(b'"ByteLevel"', b'"ByteLevel" ', 1), None),
        ("tokenizer.json", lambda data: data.replace(b'"a"', b'"aa"'), "is not the tokenizer"),
        ("tokenizer.json", None, r"tokenizer.json does not exist"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, book, name, damage, message):
    prepare([book], tmp_path / "out", "byte")
    path = tmp_path / "out" / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    if message is None:
        open_dataset(tmp_path / "out")
    else:
        with pytest.raises(DataError, match=message):
            open_dataset(tmp_path / "out")


def test_vocabularies_beyond_65535_use_four_bytes():
    from lamella.data.tokenizers import token_dtype

    assert token_dtype(65_535) == np.dtype("<u2")
    assert token_dtype(65_536) == np.dtype("<u4")
