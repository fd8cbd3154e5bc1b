"""The three kinds of tokenizer."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.data import (
    DataError,
    austen,
    check_spec,
    encode_text,
    load_tokenizer,
    make_tokenizer,
    save_tokenizer,
    token_bytes,
    tokenizer_digest,
)
from lamella.data import tokenizers as tokenizers_module
from lamella.data.text import chunks

PRINTABLE = "\n" + "".join(chr(i) for i in range(32, 127))
SAMPLE = austen("test")[:100_000]
SPECS = {"char": 96, "byte": 256, "bpe-300": 300}
TOKENIZERS = {spec: make_tokenizer(spec, [SAMPLE]) for spec in SPECS}
LOSSLESS = [spec for spec in SPECS if spec != "char"]


@pytest.mark.parametrize("spec", SPECS)
def test_vocabulary_has_the_size_its_spec_says(spec):
    assert TOKENIZERS[spec].get_vocab_size() == check_spec(spec) == SPECS[spec]
    assert [TOKENIZERS[spec].id_to_token(i) for i in range(SPECS[spec])].count(None) == 0


@pytest.mark.parametrize("spec", LOSSLESS)
@given(text=st.text(max_size=60))
def test_byte_level_tokenizers_give_back_any_unicode(spec, text):
    tokenizer = TOKENIZERS[spec]
    ids, num_bytes = encode_text(tokenizer, text)
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
    assert num_bytes == len(text.encode()) == token_bytes(tokenizer)[ids].sum()


@given(st.text(alphabet=PRINTABLE, max_size=80))
def test_char_gives_back_its_96_characters(text):
    ids, num_bytes = encode_text(TOKENIZERS["char"], text)
    assert ids.tolist() == [PRINTABLE.index(c) for c in text]
    assert TOKENIZERS["char"].decode(ids.tolist()) == text
    assert num_bytes == len(text)


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("“Don’t”—he said…", '"Don\'t"--he said...'),
        ("«a» – ‘b’ − c", "\"a\" - 'b' - c"),
        ("café Ærøskøbing naïve œuvre", "cafe AEroskobing naive oeuvre"),
        ("a\r\nb\tc\u00a0d\ufeff", "a\nb c d"),
        ("£5 ½ ﬁ", "L5 1/2 fi"),
        ("日本 \x07", "?? ?"),
    ],
)
def test_char_brings_other_text_near_its_characters(text, becomes):
    ids, num_bytes = encode_text(TOKENIZERS["char"], text)
    assert TOKENIZERS["char"].decode(ids.tolist()) == becomes
    assert num_bytes == len(text.encode())


@given(st.text(max_size=60))
def test_char_makes_ascii_of_any_text(text):
    ids, _ = encode_text(TOKENIZERS["char"], text)
    assert set(TOKENIZERS["char"].decode(ids.tolist())) <= set(PRINTABLE)


@given(st.text(max_size=40))
def test_byte_ids_are_the_bytes(text):
    assert encode_text(TOKENIZERS["byte"], text)[0].tolist() == list(text.encode())


@pytest.mark.parametrize("spec", SPECS)
@given(text=st.text(alphabet="ab. '\n\r\té日", max_size=60), size=st.integers(20, 30))
def test_tokenizing_chunks_gives_what_the_whole_text_gives(spec, text, size):
    # Lines and words are shorter than a chunk here, so that every cut is at a line end or a space.
    text = "\n".join(text[i : i + 4] + "x y" for i in range(0, len(text), 4))
    tokenizer = TOKENIZERS[spec]
    pieces = [i for chunk in chunks([text], size) for i in tokenizer.encode(chunk).ids]
    assert pieces == tokenizer.encode(text).ids


@pytest.mark.parametrize("spec", SPECS)
def test_a_book_in_chunks_gives_what_the_whole_book_gives(spec, monkeypatch):
    monkeypatch.setattr(tokenizers_module, "BATCH_CHUNKS", 2)
    text = SAMPLE.replace("Captain", "Capitaine é")
    ids, _ = encode_text(TOKENIZERS[spec], text)
    assert ids.tolist() == TOKENIZERS[spec].encode(text).ids


def test_bpe_training_repeats_in_another_process_with_one_thread():
    code = (
        "from lamella.data import *\n"
        "print(tokenizer_digest(make_tokenizer('bpe-300', austen('test')[:100000])))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    aside = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert aside.stdout.strip() == tokenizer_digest(TOKENIZERS["bpe-300"])


@pytest.mark.parametrize("spec", SPECS)
def test_saved_tokenizers_load_as_the_same(tmp_path, spec):
    path = save_tokenizer(TOKENIZERS[spec], tmp_path)
    assert path == tmp_path / "tokenizer.json"
    for source in (path, tmp_path):
        loaded = load_tokenizer(source)
        assert tokenizer_digest(loaded) == tokenizer_digest(TOKENIZERS[spec])
        assert loaded.encode("Anne é “x”").ids == TOKENIZERS[spec].encode("Anne é “x”").ids


def test_digests_tell_tokenizers_apart_but_not_padding():
    digests = {tokenizer_digest(tokenizer) for tokenizer in TOKENIZERS.values()}
    assert len(digests) == 3
    padded = make_tokenizer("byte")
    padded.enable_padding()
    padded.enable_truncation(8)
    assert tokenizer_digest(padded) == tokenizer_digest(TOKENIZERS["byte"])


@pytest.mark.parametrize("spec", SPECS)
def test_wrapping_for_transformers_changes_no_token(spec, tmp_path):
    import transformers

    text = "Anne said,\n\n 'No , it isn't .'  Twice\n"
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[spec])
    assert wrapped(text)["input_ids"] == TOKENIZERS[spec].encode(text).ids
    assert wrapped.decode(wrapped(text)["input_ids"]) == text
    wrapped.save_pretrained(tmp_path)
    again = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == TOKENIZERS[spec].encode(text).ids


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bype", "Did you mean 'byte'?"),
        ("chars", "Did you mean 'char'?"),
        ("bpe4096", "Did you mean 'bpe-4096'?"),
        ("BPE_512", "Did you mean 'bpe-512'?"),
        ("bpe-", "Did you mean 'bpe-4096'?"),
        ("wordpiece", "give 'char', 'byte' or 'bpe-N'"),
        ("bpe-256", "needs N >= 257"),
        ("bpe-0", "unknown tokenizer"),
    ],
)
def test_unknown_specs_are_refused_with_the_nearest_right_one(spec, message):
    with pytest.raises(DataError) as caught:
        make_tokenizer(spec, ["text"])
    assert message in str(caught.value)


def test_bpe_without_text_or_with_too_little_says_what_fits():
    with pytest.raises(DataError, match="give texts"):
        make_tokenizer("bpe-300")
    with pytest.raises(DataError, match=r"yields 260 tokens. Give 'bpe-260' or smaller"):
        make_tokenizer("bpe-300", ["ab cd ab cd"])
    assert make_tokenizer("bpe-260", ["ab cd ab cd"]).get_vocab_size() == 260
    with pytest.raises(DataError, match=r"yields 256 tokens. Give 'byte' or 'char'"):
        make_tokenizer("bpe-300", ["a"])


def test_token_bytes_are_one_per_char_and_unknown_for_other_kinds():
    assert np.array_equal(token_bytes(TOKENIZERS["char"]), np.ones(96))
    assert np.array_equal(token_bytes(TOKENIZERS["byte"]), np.ones(256))
    from tokenizers import Tokenizer, models

    with pytest.raises(DataError, match="char, byte and bpe-N"):
        token_bytes(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def test_text_without_utf8_form_is_refused():
    with pytest.raises(DataError, match="surrogates not allowed at character 2"):
        encode_text(TOKENIZERS["byte"], "ab\ud800")


def test_damaged_or_missing_tokenizer_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(DataError, match=r"is not a tokenizer.json"):
        load_tokenizer(tmp_path)


def test_missing_tokenizers_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lamella\[lm\]'"):
        make_tokenizer("char")
