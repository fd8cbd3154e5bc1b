"""Reading text files and cutting them into chunks."""

import gzip
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.data import DataError, austen, iter_text, read_text
from lamella.data import text as text_module
from lamella.data.corpus import BOOKS, books, whole_text
from lamella.data.text import chunks

PACKERS = {"a.txt": bytes, "a.txt.xz": lzma.compress, "a.gz": gzip.compress}


@pytest.mark.parametrize("name", PACKERS)
def test_every_kind_of_file_gives_back_its_text(tmp_path, name):
    text = "naïve “café”\r\n\n日本語\ttab\n" * 100
    (tmp_path / name).write_bytes(PACKERS[name](text.encode()))
    assert read_text(tmp_path / name) == text


@pytest.mark.parametrize("name", PACKERS)
def test_part_of_a_file_is_the_bytes_asked_for(tmp_path, name):
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / name).write_bytes(PACKERS[name](text.encode()))
    assert "".join(iter_text(tmp_path / name, 100, 2345)) == text[100:2345]


def test_characters_split_between_blocks_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 5)
    (tmp_path / "a.txt").write_text("日本語 é 𝄞" * 20, encoding="utf-8")
    assert read_text(tmp_path / "a.txt") == "日本語 é 𝄞" * 20


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.xz", lzma.compress(b""), "a.xz is empty"),
        ("a.txt", b"abc\0def", "NUL byte at offset 3"),
        ("a.txt", "text".encode("utf-16"), "binary or UTF-16: NUL byte at offset 3"),
        ("a.txt", b"abcde\xff", "not UTF-8: invalid start byte at byte 5"),
        ("a.txt", b"abcdef\xe6\x97", "not UTF-8: unexpected end of data at byte 6"),
        ("a.gz", gzip.compress(b"abc" * 999, mtime=0)[:-9], "not a whole gz file"),
        ("a.gz", b"plain", "not a whole gz file"),
        ("a.xz", lzma.compress(bytes(range(1, 128)) * 99)[:-30], "not a whole xz file"),
        ("a.xz", b"plain", "not a whole xz file"),
        ("a.pdf", b"%PDF-1.7\n\xe2\xe3\xcf\xd3\n", "UTF-8"),
    ],
)
@pytest.mark.parametrize("block_bytes", [4, 1 << 20])
def test_bad_files_are_refused_with_the_reason(tmp_path, monkeypatch, name, content, message, block_bytes):
    monkeypatch.setattr(text_module, "BLOCK_BYTES", block_bytes)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_text(tmp_path / name)


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing.txt does not exist. Give a UTF-8 text file"):
        read_text(tmp_path / "nothing.txt")
    with pytest.raises(DataError, match="is a folder"):
        read_text(tmp_path)


TEXTS = st.text(alphabet="ab \n\r\té", max_size=80)


@given(TEXTS, st.integers(1, 9), st.integers(1, 20))
def test_chunks_join_to_the_text_and_do_not_depend_on_the_blocks(text, size, block):
    whole = list(chunks([text], size))
    assert "".join(whole) == text
    assert list(chunks([text[i : i + block] for i in range(0, len(text), block)], size)) == whole
    assert all(0 < len(chunk) <= 2 * size for chunk in whole)
    assert all(len(chunk) >= size for chunk in whole[:-1])


def test_every_book_starts_with_its_title_and_the_books_are_the_whole_text():
    texts = books()
    assert len(texts) == 6
    assert all(text.startswith(BOOKS[title]) for title, text in texts.items())
    assert all(whole_text().count(lines) == 1 for lines in BOOKS.values())
    assert "".join(texts.values()) == whole_text()
    ends = {title: text.rstrip()[-20:] for title, text in texts.items()}
    assert ends["Emma"].endswith("FINIS")
    assert ends["Pride and Prejudice"].endswith("them.")
    assert ends["Sense and Sensibility"].endswith("THE END")


def test_austen_splits_are_disjoint_books_that_add_to_the_whole():
    sizes = {split: len(austen(split).encode()) for split in ("train", "validation", "test")}
    assert sum(sizes.values()) == len(whole_text().encode()) == 4_025_038
    assert austen("validation").startswith("NORTHANGER ABBEY\n")
    assert austen("test").startswith("Persuasion\n")
    assert "Sir Walter Elliot" not in austen("train") + austen("validation")
    with pytest.raises(DataError, match=r"no split 'dev'. Splits: train, validation, test"):
        austen("dev")
