"""The text that ships with the package: Jane Austen's six novels (see AUSTEN_NOTICE.txt)."""

from __future__ import annotations

import lzma
from functools import cache
from importlib.resources import files
from typing import Literal

from .text import DataError

# Title lines, in the order of the file; a book runs up to the next title.
BOOKS = {
    "Emma": "EMMA\n\nBy Jane Austen\n",
    "Mansfield Park": "MANSFIELD PARK\n\n(1814)\n",
    "Northanger Abbey": "NORTHANGER ABBEY\n\n\nby\n",
    "Persuasion": "Persuasion\n\n\nby\n",
    "Pride and Prejudice": "PRIDE AND PREJUDICE\n\nBy Jane Austen\n",
    "Sense and Sensibility": "SENSE AND SENSIBILITY\n\nby Jane Austen\n",
}
Split = Literal["train", "validation", "test"]
SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("Emma", "Mansfield Park", "Pride and Prejudice", "Sense and Sensibility"),
    "validation": ("Northanger Abbey",),
    "test": ("Persuasion",),
}


@cache
def whole_text() -> str:
    """All six novels, 4.0 MB, in the order of `BOOKS`."""
    return lzma.decompress((files("lamella.data") / "austen.txt.xz").read_bytes()).decode("utf-8")


def books() -> dict[str, str]:
    """{title: text}; joined in order they are the whole text."""
    text = whole_text()
    starts = [text.index(title_lines) for title_lines in BOOKS.values()]
    return {
        title: text[start:stop]
        for title, start, stop in zip(BOOKS, starts, [*starts[1:], len(text)], strict=True)
    }


def austen(split: Split) -> str:
    """The embedded text of a split: four novels, Northanger Abbey, or Persuasion.

    Raises: DataError for another split.
    """
    if split not in SPLITS:
        raise DataError(f"austen has no split {split!r}. Splits: {', '.join(SPLITS)}.")
    texts = books()
    return "".join(texts[title] for title in SPLITS[split])
