"""Reading text files in constant memory, and cutting text into chunks that are tokenized one by one."""

from __future__ import annotations

import codecs
import gzip
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import BinaryIO, cast

PACKED = {".xz": lzma.open, ".gz": gzip.open}  # a file of any other name is read as it is
BLOCK_BYTES = 1 << 20
CHUNK_CHARS = 32_768


class DataError(ValueError):
    """Data that cannot be used; the message says what was given and what would be right."""


def check_text_path(path: str | PathLike[str]) -> Path:
    """The path of an existing file.

    Raises: DataError if it is missing or a folder.
    """
    path = Path(path)
    right = "Give a UTF-8 text file, plain or packed (.xz, .gz)."
    if path.is_dir():
        raise DataError(f"{path} is a folder. {right}")
    if not path.exists():
        raise DataError(f"{path} does not exist. {right}")
    return path


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, PACKED.get(path.suffix.lower(), open)(path, "rb"))


def iter_bytes(path: str | PathLike[str], start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Blocks of the (unpacked) bytes start..stop of a text file.

    Raises: DataError if the file cannot be read, is corrupt, or holds NUL bytes.
    """
    path = check_text_path(path)
    offset = start
    try:
        with _open(path) as file:
            file.seek(start)
            while stop is None or offset < stop:
                block = file.read(BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - offset))
                if not block:
                    return
                if (zero := block.find(b"\0")) >= 0:
                    raise DataError(
                        f"{path} is binary or UTF-16: NUL byte at offset {offset + zero}. Give UTF-8 text."
                    )
                yield block
                offset += len(block)
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(
            f"{path} is not a whole {path.suffix[1:]} file ({error}). Pack or download it again."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def iter_text(path: str | PathLike[str], start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Blocks of about 1 MB of the text of a file, plain or packed (.xz, .gz); line ends are kept as they are.

    start, stop: byte offsets in the unpacked text, at character boundaries.
    Raises: DataError if there is no text, or it is no UTF-8; see also `iter_bytes`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = start
    try:
        for block in iter_bytes(path, start, stop):
            text = decoder.decode(block)
            offset += len(block)
            if text:
                yield text
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        pending = len(decoder.getstate()[0])
        raise DataError(
            f"{path} is not UTF-8: {error.reason} at byte {offset - pending + error.start}. "
            "Convert it, for example with iconv -t UTF-8."
        ) from error
    if offset == start:
        raise DataError(f"{path} is empty. Give a file with text.")


def read_text(path: str | PathLike[str]) -> str:
    """The whole text of a .txt, .xz or .gz file. Raises: DataError, see `iter_text`."""
    return "".join(iter_text(path))


# Byte-level BPE splits words at both places whatever stands around them, so that tokenizing the chunks
# gives what tokenizing the whole text gives.
_CUTS = (re.compile(r"\n(?=\S)"), re.compile(r"(?<=\S) (?=\S)"))


def chunks(blocks: Iterable[str], size: int = CHUNK_CHARS) -> Iterator[str]:
    """Cut a text, given in blocks, into chunks of `size` to 2 `size` characters; the last may be shorter.

    A chunk ends before a line end that a character other than white space follows; where there is none,
    before a single space; where there is none either, after 2 `size` characters. The chunks depend on
    the text alone, not on the blocks.
    """
    buffer = ""
    for block in blocks:
        buffer += block
        start = 0
        while len(buffer) - start > 2 * size:
            stop = _cut(buffer, start, size)
            yield buffer[start:stop]
            start = stop
        buffer = buffer[start:]
    while len(buffer) > size:
        stop = _cut(buffer, 0, size)
        yield buffer[:stop]
        buffer = buffer[stop:]
    if buffer:
        yield buffer


def _cut(text: str, start: int, size: int) -> int:
    stop = start + 2 * size
    for pattern in _CUTS:
        if match := pattern.search(text, start + size, stop + 1):
            return match.start()
    return min(stop, len(text))
