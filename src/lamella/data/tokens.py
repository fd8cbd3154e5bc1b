"""Tokenized text: `Tokens` (one split), `Dataset` (splits and their tokenizer), and how to open one.

A dataset folder:

    train.bin, validation.bin, test.bin   token ids, raw little-endian uint16 (uint32 beyond 65535 tokens);
                                          test.bin may be missing
    tokenizer.json                        the tokenizer that made them
    dataset.json                          format version, tokenizer (spec, digest, vocabulary size), digest,
                                          and per split: tokens, bytes (UTF-8, of the original text), sha256
                                          (of the .bin file), dtype, sources
"""

from __future__ import annotations

import difflib
import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .corpus import SPLITS, austen
from .text import DataError
from .tokenizers import (
    check_spec,
    encode_text,
    json_digest,
    load_tokenizer,
    make_tokenizer,
    token_dtype,
    tokenizer_digest,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
AUSTEN_TOKENIZER = "bpe-1024"


class Tokens:
    """The token ids of one text, in memory or memory-mapped.

    ids: 1-D array of unsigned integers; not copied.
    num_bytes: UTF-8 bytes of the original text.
    digest: SHA-256 (hex) of the ids as little-endian bytes; computed where it is not given.
    """

    def __init__(
        self, ids: np.ndarray, *, num_bytes: int, vocab_size: int, digest: str | None = None, name: str = ""
    ) -> None:
        self.ids = ids
        self.num_tokens = len(ids)
        self.num_bytes = num_bytes
        self.vocab_size = vocab_size
        self.name = name
        self.digest = digest or hashlib.sha256(ids.astype(token_dtype(vocab_size)).tobytes()).hexdigest()

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        size = f"num_tokens={self.num_tokens}, num_bytes={self.num_bytes}, vocab_size={self.vocab_size}"
        return f"Tokens({size}, name={self.name!r})"

    def take(self, positions: np.ndarray) -> np.ndarray:
        """The ids at `positions` (any shape), as int64.

        Raises: DataError if an id is outside the vocabulary.
        """
        ids = self.ids[positions].astype(np.int64)
        if ids.size and (largest := int(ids.max())) >= self.vocab_size:
            raise DataError(
                f"{self.name or 'the text'} holds token id {largest}, but its vocabulary has "
                f"{self.vocab_size} tokens: the file is damaged or belongs to another tokenizer."
            )
        return ids


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """Tokenized splits with the tokenizer that made them.

    name: "austen", or the folder's name.
    digest: SHA-256 (hex) over the tokenizer and the ids of all splits; the same text and tokenizer give the
        same digest, in memory or in a folder.
    """

    name: str
    train: Tokens
    validation: Tokens
    test: Tokens | None
    tokenizer: Tokenizer = field(repr=False)
    tokenizer_spec: str
    digest: str

    @property
    def vocab_size(self) -> int:
        return self.train.vocab_size


def dataset_digest(tokenizer: str, splits: Mapping[str, str]) -> str:
    """The digest of a dataset from its tokenizer's and its splits' digests."""
    text = json.dumps({"tokenizer": tokenizer, **splits}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def open_dataset(spec: str | PathLike[str], tokenizer: str | None = None) -> Dataset:
    """Open the embedded text ("austen") or a dataset folder.

    tokenizer: for "austen" the tokenizer's spec, "bpe-1024" if None; a BPE is trained on the train split.
        A folder has its own tokenizer, and another spec is an error. ("./austen" is a folder of that name.)
    Raises: DataError if there is no such dataset, it is damaged, or the tokenizer does not fit.
    """
    if str(spec) == "austen":
        return _open_austen(tokenizer or AUSTEN_TOKENIZER)
    return _open_folder(Path(spec), tokenizer)


def _open_austen(spec: str) -> Dataset:
    tokenizer = make_tokenizer(spec, [austen("train")])
    splits = {}
    for split in SPLITS:
        ids, num_bytes = encode_text(tokenizer, austen(split))
        splits[split] = Tokens(
            ids, num_bytes=num_bytes, vocab_size=tokenizer.get_vocab_size(), name=f"austen {split}"
        )
    digest = dataset_digest(tokenizer_digest(tokenizer), {name: t.digest for name, t in splits.items()})
    return Dataset(name="austen", tokenizer=tokenizer, tokenizer_spec=spec, digest=digest, **splits)


def _open_folder(folder: Path, spec: str | None) -> Dataset:
    content = _read_description(folder)
    own = content["tokenizer"]
    if spec is not None and spec != own["spec"]:
        check_spec(spec)
        raise DataError(
            f"{folder} is tokenized with {own['spec']!r}, but {spec!r} was asked for. "
            f"Leave the tokenizer out, or prepare the text again with {spec!r}."
        )
    tokenizer = load_tokenizer(folder)
    if json_digest((folder / "tokenizer.json").read_text(encoding="utf-8")) != own["digest"]:
        raise DataError(f"{folder}/tokenizer.json is not the tokenizer dataset.json names. Prepare it again.")
    splits: dict[str, Any] = {
        split: _map_split(folder, split, content["splits"][split], own["vocab_size"])
        if split in content["splits"]
        else None
        for split in SPLITS
    }
    digest = dataset_digest(own["digest"], {name: t.digest for name, t in splits.items() if t is not None})
    name = folder.resolve().name
    return Dataset(name=name, tokenizer=tokenizer, tokenizer_spec=own["spec"], digest=digest, **splits)


def _read_description(folder: Path) -> dict[str, Any]:
    if folder.is_file():
        raise DataError(
            f"{folder} is a file; a dataset is a folder. Make one with: lamella prepare {folder} --out FOLDER"
        )
    if not folder.is_dir():
        near = " Did you mean 'austen'?" if difflib.get_close_matches(str(folder).lower(), ["austen"]) else ""
        raise DataError(
            f"there is no dataset {str(folder)!r}.{near} Give 'austen' (the embedded text) or a dataset "
            f"folder, made with: lamella prepare FILES --out {folder}"
        )
    path = folder / "dataset.json"
    if not path.is_file():
        raise DataError(
            f"{folder} is no dataset folder: it has no dataset.json. Make one with: "
            "lamella prepare FILES --out FOLDER"
        )
    damaged = f"{path} is damaged: {{}}. Prepare the dataset again."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(damaged.format(repr(error))) from error
    if version != FORMAT:
        raise DataError(f"{path} has format {version!r}; this version of lamella reads format {FORMAT}.")
    try:
        _check_keys(content)
    except (KeyError, TypeError) as error:
        raise DataError(damaged.format(repr(error))) from error
    return content


def _check_keys(content: Mapping[str, Any]) -> None:
    operator.itemgetter("spec", "digest", "vocab_size")(content["tokenizer"])
    operator.itemgetter("train", "validation")(content["splits"])
    for facts in content["splits"].values():
        operator.itemgetter("tokens", "bytes", "sha256")(facts)
        np.dtype(facts["dtype"])


def _map_split(folder: Path, split: str, facts: Mapping[str, Any], vocab_size: int) -> Tokens:
    path = folder / f"{split}.bin"
    dtype = np.dtype(facts["dtype"])
    expected = facts["tokens"] * dtype.itemsize
    if not path.is_file():
        raise DataError(f"{path} is missing, but dataset.json lists it. Prepare the dataset again.")
    if (size := path.stat().st_size) != expected:
        raise DataError(
            f"{path} holds {size} bytes, but dataset.json says {expected} ({facts['tokens']} tokens): "
            "it is cut short or was changed. Prepare the dataset again."
        )
    ids = np.memmap(path, dtype=dtype, mode="r")
    return Tokens(
        ids, num_bytes=facts["bytes"], vocab_size=vocab_size, digest=facts["sha256"], name=str(path)
    )
