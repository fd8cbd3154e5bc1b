"""Text files -> dataset folder, in constant memory; the folder appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .text import DataError, check_text_path, chunks, iter_bytes, iter_text
from .tokenizers import (
    check_spec,
    encode_blocks,
    make_tokenizer,
    require_tokenizers,
    save_tokenizer,
    token_dtype,
    tokenizer_digest,
)
from .tokens import FORMAT, dataset_digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Files = Sequence[str | PathLike[str]]
Progress = Callable[[int, int], None]

SAMPLE_BYTES = 20_000_000
DEFAULT_FRAC = 0.01


@dataclass(frozen=True)
class Source:
    """Bytes start..stop of the (unpacked) text of a file."""

    path: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def blocks(self) -> Iterator[str]:
        return iter_text(self.path, self.start, self.stop)


def prepare(
    files: Files,
    out: str | PathLike[str],
    tokenizer: str = "bpe-4096",
    *,
    validation_files: Files = (),
    test_files: Files = (),
    validation_frac: float | None = None,
    test_frac: float | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokenize .txt, .xz or .gz files into the dataset folder `out`.

    The text is `files` one after the other; no token spans two files. Without `validation_files` the last
    `validation_frac` (0.01) of it is the validation split, and without any of `validation_files` and
    `test_files` the `test_frac` (0.01) before that is the test split, both cut where a line starts.
    test_frac=0 leaves the test split out. A `bpe-N` tokenizer is trained on the first 20 MB of the train
    split.

    overwrite: replace `out` if it is a finished dataset folder.
    progress: called with (bytes done, bytes in all), from (0, all) to (all, all).

    Returns: the content of dataset.json, and `out`.
    Raises: DataError (a ValueError) for bad files, fractions, tokenizer or `out`; nothing is left then.
    """
    check_spec(tokenizer)
    require_tokenizers()
    given = {
        "train": _check_files(files),
        "validation": _check_files(validation_files),
        "test": _check_files(test_files),
    }
    fractions = _check_fractions(given, validation_frac, test_frac)
    _check_disjoint(given)
    with _staging(Path(out).resolve(), overwrite) as folder:
        sources = _assign(given, fractions)
        trained = make_tokenizer(tokenizer, _sample(sources["train"]))
        total = sum(source.num_bytes for split in sources.values() for source in split)
        report = _Counter(total, progress)
        # Train comes last, so that a fault in the short splits shows early.
        splits = {
            split: _write_split(folder, split, sources[split], trained, report.add)
            for split in ("validation", "test", "train")
            if sources[split]
        }
        description = _describe(tokenizer, trained, splits)
        save_tokenizer(trained, folder)
        (folder / "dataset.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    return {**description, "out": str(out)}


def _check_files(files: Files) -> list[Path]:
    if isinstance(files, str | PathLike):
        raise DataError(f"files={str(files)!r} is one path; give a list of paths.")
    return [check_text_path(path) for path in files]


def _check_disjoint(given: Mapping[str, list[Path]]) -> None:
    seen: dict[Path, str] = {}
    for split, paths in given.items():
        for path in paths:
            if (other := seen.setdefault(path.resolve(), split)) != split:
                raise DataError(
                    f"{path} is given for both {other} and {split}. Give each split its own files."
                )


def _check_fractions(
    given: Mapping[str, list[Path]], validation_frac: float | None, test_frac: float | None
) -> dict[str, float]:
    if not given["train"]:
        raise DataError("no files are given. Give at least one text file (.txt, .xz or .gz).")
    for split, frac in (("validation", validation_frac), ("test", test_frac)):
        if given[split] and frac is not None:
            raise DataError(f"{split}_files and {split}_frac={frac} are both given. Give one of them.")
    default_test = 0.0 if given["validation"] or given["test"] else DEFAULT_FRAC
    validation = 0.0 if given["validation"] else DEFAULT_FRAC if validation_frac is None else validation_frac
    test = default_test if test_frac is None else test_frac
    if not (given["validation"] or 0 < validation < 1):
        raise DataError(f"validation_frac={validation}: it must be above 0 and below 1.")
    if not 0 <= test < 1:
        raise DataError(f"test_frac={test}: it must be at least 0 and below 1.")
    if validation + test >= 1:
        raise DataError(
            f"validation_frac={validation} and test_frac={test} leave nothing to train on: "
            "their sum must be below 1."
        )
    return {"validation": validation, "test": test}


def _assign(given: Mapping[str, list[Path]], fractions: Mapping[str, float]) -> dict[str, list[Source]]:
    """Read every file once, to check it and to know its size; then say which bytes are in which split."""
    whole = {
        split: [Source(path, 0, sum(len(block.encode()) for block in iter_text(path))) for path in paths]
        for split, paths in given.items()
    }
    text = whole["train"]
    total = sum(source.num_bytes for source in text)
    validation_start = _line_start(text, total - round(total * fractions["validation"]))
    test_start = _line_start(text, total - round(total * (fractions["validation"] + fractions["test"])))
    parts = {
        "train": _slice(text, 0, test_start),
        "test": _slice(text, test_start, validation_start),
        "validation": _slice(text, validation_start, total),
    }
    for split, frac in {"train": 1.0, **fractions}.items():
        if frac and not parts[split]:
            raise DataError(
                f"the text ({total} bytes) has too few lines to cut: {split} would be empty. Splits start "
                "where a line starts. Give more text, other fractions, or files for validation and test."
            )
    return {split: whole[split] if split != "train" and whole[split] else parts[split] for split in parts}


def _line_start(sources: Sequence[Source], target: int) -> int:
    """The first line or file start at or after a position in the joined text."""
    ends = list(accumulate(source.num_bytes for source in sources))
    for source, end in zip(sources, ends, strict=True):
        start = end - source.num_bytes
        if target <= start or target >= end:
            if target == start:
                return start
            continue
        offset = start + (target - start - 1)
        for block in iter_bytes(source.path, target - start - 1):
            if (newline := block.find(b"\n")) >= 0:
                return offset + newline + 1
            offset += len(block)
        return end
    return ends[-1]


def _slice(sources: Sequence[Source], start: int, stop: int) -> list[Source]:
    """The bytes start..stop of the joined text."""
    parts, position = [], 0
    for source in sources:
        low, high = max(start - position, 0), min(stop - position, source.num_bytes)
        if low < high:
            parts.append(Source(source.path, low, high))
        position += source.num_bytes
    return parts


def _sample(sources: Sequence[Source]) -> Iterator[str]:
    """The first SAMPLE_BYTES of the text, in whole chunks."""
    left = SAMPLE_BYTES
    for source in sources:
        for chunk in chunks(source.blocks()):
            if left <= 0:
                return
            yield chunk
            left -= len(chunk.encode())


class _Counter:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress
        self.add(0)

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _write_split(
    folder: Path, split: str, sources: Sequence[Source], tokenizer: Tokenizer, report: Callable[[int], None]
) -> dict[str, Any]:
    sha256 = hashlib.sha256()
    dtype = token_dtype(tokenizer.get_vocab_size())
    num_tokens = 0
    with (folder / f"{split}.bin").open("wb") as file:
        for source in sources:
            done = 0
            for ids, num_bytes in encode_blocks(tokenizer, source.blocks()):
                data = ids.astype(dtype, copy=False).tobytes()
                file.write(data)
                sha256.update(data)
                num_tokens += len(ids)
                done += num_bytes
                report(num_bytes)
            if done != source.num_bytes:
                raise DataError(f"{source.path} changed while it was read. Run prepare again.")
    if num_tokens < 2:
        raise DataError(f"the {split} split has {num_tokens} tokens; it needs at least 2. Give more text.")
    return {
        "tokens": num_tokens,
        "bytes": sum(source.num_bytes for source in sources),
        "sha256": sha256.hexdigest(),
        "dtype": dtype.str,
        "sources": [{"file": str(s.path), "start": s.start, "stop": s.stop} for s in sources],
    }


def _describe(spec: str, tokenizer: Tokenizer, splits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    digest = tokenizer_digest(tokenizer)
    return {
        "format": FORMAT,
        "digest": dataset_digest(digest, {split: facts["sha256"] for split, facts in splits.items()}),
        "tokenizer": {"spec": spec, "digest": digest, "vocab_size": tokenizer.get_vocab_size()},
        "splits": {split: splits[split] for split in ("train", "validation", "test") if split in splits},
    }


@contextmanager
def _staging(out: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` at the end, or vanishes on an error.

    It is locked while it is in use, so that a later call can tell and remove what a killed one left.
    """
    _check_out(out, overwrite)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for stale in out.parent.glob(f".{_escape(out.name)}.partial-*"):
            _remove_if_stale(stale)
        folder = _beside(out)
        folder.mkdir()
    except OSError as error:
        raise DataError(
            f"{out} cannot be made: {error.strerror} ({error.filename}). Give a folder that can be written."
        ) from error
    lock = _lock(folder)
    try:
        yield folder
        for path in [*folder.iterdir(), folder]:
            _fsync(path)
        _check_out(out, overwrite)
        if out.exists() and any(out.iterdir()):
            out.rename(replaced := _beside(out))
            folder.rename(out)
            shutil.rmtree(replaced)
        else:
            folder.rename(out)
        _fsync(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _check_out(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file. Give a folder for the dataset.")
    if not out.is_dir() or not (names := {path.name for path in out.iterdir()}):
        return
    if "dataset.json" not in names:
        raise DataError(f"{out} is not empty and no dataset folder. Give a new or empty folder.")
    if not overwrite:
        raise DataError(
            f"{out} already holds a dataset. Give another folder, or overwrite it (overwrite=True)."
        )
    ours = {"train.bin", "validation.bin", "test.bin", "tokenizer.json", "dataset.json"}
    if others := sorted(names - ours):
        raise DataError(
            f"{out} holds more than a dataset: {', '.join(others)}. It is not overwritten. Move them or give "
            "another folder."
        )


def _beside(out: Path) -> Path:
    return out.parent / f".{out.name}.partial-{secrets.token_hex(4)}"


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where another has it, or there are no such locks."""
    try:
        import fcntl
    except ModuleNotFoundError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_if_stale(folder: Path) -> None:
    if (lock := _lock(folder)) is not None:
        shutil.rmtree(folder)
        os.close(lock)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
