"""Text, tokenizers, token files and batches. Imports nothing else of lamella."""

from .batches import Batches, windows
from .corpus import austen
from .prepare import prepare
from .text import DataError, iter_text, read_text
from .tokenizers import (
    check_spec,
    encode_text,
    load_tokenizer,
    make_tokenizer,
    save_tokenizer,
    token_bytes,
    tokenizer_digest,
)
from .tokens import Dataset, Tokens, open_dataset

__all__ = [
    "Batches",
    "DataError",
    "Dataset",
    "Tokens",
    "austen",
    "check_spec",
    "encode_text",
    "iter_text",
    "load_tokenizer",
    "make_tokenizer",
    "open_dataset",
    "prepare",
    "read_text",
    "save_tokenizer",
    "token_bytes",
    "tokenizer_digest",
    "windows",
]
