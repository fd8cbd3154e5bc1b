"""Three kinds of tokenizer, each a `tokenizers.Tokenizer`, so that an exported model gets the very same.

char    96 characters: newline and printable ASCII. Other text is brought near it first (typographic
        quotes, dashes, accents, ...); what has no likeness becomes "?". Carriage returns are dropped.
byte    256 tokens, id = byte value; lossless.
bpe-N   byte-level BPE with N tokens (N >= 257), trained on a text; lossless.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .text import DataError, chunks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
BATCH_CHUNKS = 8
MIN_BPE = 257

# After NFKD and without accents: what stands for what in the `char` tokenizer.
_LIKENESS = {
    "[\u2018\u2019\u201a\u201b\u2032\u02bc]": "'",
    "[\u201c\u201d\u201e\u201f\u00ab\u00bb]": '"',
    "[\u2010\u2011\u2012\u2013\u2212]": "-",
    "[\u2014\u2015]": "--",
    "\t": " ",
    "[\u000b\u000c\u0085\u2028\u2029]": "\n",
    "[\r\ufeff\u200b\u00ad]": "",
    "\u00a3": "L",
    "\u2044": "/",
    "\u00e6": "ae",
    "\u00c6": "AE",
    "\u0153": "oe",
    "\u0152": "OE",
    "\u00df": "ss",
    "\u00f8": "o",
    "\u00d8": "O",
}


def require_tokenizers() -> None:
    """Raise ModuleNotFoundError, naming the extra to install, if `tokenizers` is missing."""
    try:
        import tokenizers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Tokenizers need the package tokenizers: pip install 'lamella[lm]'", name="tokenizers"
        ) from error


def check_spec(spec: str) -> int:
    """The vocabulary size a tokenizer spec ("char", "byte", "bpe-N") asks for.

    Raises: DataError for anything else, with the nearest right spec.
    """
    if spec == "char":
        return len(CHARACTERS)
    if spec == "byte":
        return 256
    if match := re.fullmatch(r"bpe-([1-9]\d*)", spec):
        if (size := int(match[1])) < MIN_BPE:
            raise DataError(
                f"tokenizer {spec!r} is too small: bpe-N needs N >= {MIN_BPE} (256 bytes and merges)."
            )
        return size
    if match := re.fullmatch(r"bpe\W*_?0*([1-9]\d*)", spec.strip().lower()):
        near = [f"bpe-{match[1]}"]
    else:
        near = difflib.get_close_matches(spec.strip().lower(), ["char", "byte", "bpe-4096"], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(
        f"unknown tokenizer {spec!r}: give 'char', 'byte' or 'bpe-N' with N tokens, such as 'bpe-4096'.{hint}"
    )


def make_tokenizer(spec: str, texts: Iterable[str] | str | None = None) -> Tokenizer:
    """The tokenizer of a spec; `bpe-N` is trained on `texts`, the others ignore them.

    The same texts give the same tokenizer, however many threads there are.
    Raises: DataError if the spec is unknown, or the texts are missing or too small for N tokens.
    """
    size = check_spec(spec)
    require_tokenizers()
    if spec == "char":
        return _char()
    if spec == "byte":
        return _byte_level({character: byte for byte, character in enumerate(_byte_characters())})
    if texts is None:
        raise DataError(f"tokenizer {spec!r} is trained on a text: give texts.")
    return _train_bpe(size, [texts] if isinstance(texts, str) else texts)


def _char() -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?", fuse_unk=False))
    likeness = [normalizers.Replace(Regex(pattern), by) for pattern, by in _LIKENESS.items()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), *likeness])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _byte_level(vocabulary: dict[str, int] | None = None) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = vocabulary is None  # without merges there is no need to find words
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=None if words else []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train_bpe(size: int, texts: Iterable[str]) -> Tokenizer:
    from tokenizers import trainers

    tokenizer = _byte_level()
    alphabet = sorted(_byte_characters())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(chain.from_iterable(chunks([text]) for text in texts), trainer)
    if (found := tokenizer.get_vocab_size()) < size:
        right = f"'bpe-{found}' or smaller" if found >= MIN_BPE else "'byte' or 'char'"
        raise DataError(f"the text is too small for 'bpe-{size}': it yields {found} tokens. Give {right}.")
    return tokenizer


def encode_blocks(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
    """Tokenize a text given in blocks, in constant memory: pairs (ids, bytes of text they stand for).

    The text is cut by `chunks`, and each chunk is tokenized by itself.
    """
    dtype = token_dtype(tokenizer.get_vocab_size())
    pieces = chunks(blocks)
    while batch := list(islice(pieces, BATCH_CHUNKS)):
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids = np.concatenate([np.asarray(encoding.ids, dtype=dtype) for encoding in encodings])
        yield ids, sum(len(chunk.encode()) for chunk in batch)


def encode_text(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, int]:
    """(token ids, number of UTF-8 bytes of the text).

    Raises: DataError if the text has no UTF-8 form (lone surrogates).
    """
    try:
        pieces = list(encode_blocks(tokenizer, [text.encode().decode()]))
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text is not valid Unicode: {error.reason} at character {error.start}."
        ) from error
    ids = [np.zeros(0, token_dtype(tokenizer.get_vocab_size())), *(piece for piece, _ in pieces)]
    return np.concatenate(ids), sum(num_bytes for _, num_bytes in pieces)


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16, or uint32 where the vocabulary is larger than 65535."""
    return np.dtype("<u2" if vocab_size <= 65535 else "<u4")


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """(vocabulary,) int64: the bytes of text each token stands for.

    Exact for byte and bpe-N. Each `char` token counts as one, so text that was normalised (an em dash, an
    accent) counts as what it became, whereas `Tokens.num_bytes` counts the original text.
    Raises: DataError for a tokenizer of another kind.
    """
    from tokenizers import decoders

    tokens = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return np.array([len(token) for token in tokens], dtype=np.int64)
    if "".join(tokens) == CHARACTERS:
        return np.ones(len(tokens), dtype=np.int64)
    raise DataError("the bytes of a token are known for char, byte and bpe-N tokenizers only.")


def save_tokenizer(tokenizer: Tokenizer, path: str | PathLike[str]) -> Path:
    """Write `tokenizer.json` (into a folder, or to that path); returns the file's path."""
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    tokenizer.save(str(path))
    return path


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Read a `tokenizer.json`, or the one in a folder.

    Raises: DataError if there is none or it cannot be read.
    """
    require_tokenizers()
    from tokenizers import Tokenizer

    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give a tokenizer.json or a folder that holds one.")
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer.json: {error}.") from error


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 (hex) of what a tokenizer does, as canonical JSON.

    Padding, truncation and post-processing are left out: they are no part of how text becomes tokens here, and
    transformers changes them when it saves.
    """
    return json_digest(tokenizer.to_str())


def json_digest(text: str) -> str:
    """The `tokenizer_digest` of a tokenizer.json's text."""
    content = json.loads(text)
    for setting in ("truncation", "padding", "post_processor"):
        content.pop(setting, None)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
