"""Bits per byte and perplexity: the one definition, used while training, by `compare` and by `lamella eval`.

The whole text is tokenised once, without special tokens. With context T, window i has the inputs ids[iT : iT+T] and
the targets ids[iT+1 : iT+T+1], the last one shorter where it has to be; so every token but the first is predicted
exactly once. Natural-log losses of a float32 model without autocast are summed in float64.

    bits per byte = sum of losses / ln 2 / UTF-8 bytes of the text        perplexity = exp(sum / predicted tokens)

The same in plain transformers, for an exported directory:

    import math, sys, torch, transformers
    folder, text = sys.argv[1], open(sys.argv[2], encoding="utf-8", newline="").read()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    total, context = 0.0, model.config.max_position_embeddings
    with torch.no_grad():
        for start in range(0, len(ids) - 1, context):
            window = ids[start : start + context + 1]
            logits = model(window[None, :-1]).logits[0]
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    print(total / math.log(2) / len(text.encode()))
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamella.data import (
    DataError,
    Tokens,
    encode_text,
    load_tokenizer,
    open_dataset,
    read_text,
    token_bytes,
    tokenizer_digest,
    windows,
)
from lamella.train.checkpoint import checkpoint_paths, latest_checkpoint, read_checkpoint
from lamella.train.folder import RunError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

Progress = Callable[[int, int], None]
Split = Literal["train", "validation", "test"]
TOKENS_PER_BATCH = 8192


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model predicts a text.

    bpb: bits per byte. nll_nats: summed natural-log loss. tokens: predicted ones. bytes: of the text.
    bpb_structured: bpb of the structured layers alone, for a model that is guided. replaced_characters: how many the
    tokenizer could not represent; None where the text itself was not given. of: what was opened.
    """

    bpb: float
    perplexity: float
    nll_nats: float
    tokens: int
    bytes: int
    context: int
    bpb_structured: float | None = None
    replaced_characters: int | None = None
    of: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: nn.Module,
    text: Tokens | str,
    *,
    context: int,
    tokenizer: "Tokenizer | None" = None,
    limit_tokens: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Score a model on a text or its tokens; see the top of this file for the definition.

    The model's own dtype is used, so give it in float32. tokenizer: needed for a str, and with limit_tokens.
    limit_tokens: predict at most that many tokens, from the start; the bytes are then those of these tokens.
    batch_size: windows at a time, by default about 8192 tokens.
    progress: called with (tokens predicted, tokens in all).

    Raises: ValueError if the text has fewer than 2 tokens or belongs to a larger vocabulary than the model's.
    """
    for name, value in (("limit_tokens", limit_tokens), ("batch_size", batch_size), ("context", context)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r}: it must be a positive whole number")
    replaced = None
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("give the tokenizer to evaluate a str")
        tokens, replaced = _tokenized(tokenizer, text)
    else:
        tokens = text
    vocab = getattr(getattr(model, "config", None), "vocab_size", tokens.vocab_size)
    if tokens.vocab_size > vocab:
        raise ValueError(
            f"the text has a vocabulary of {tokens.vocab_size} tokens and the model one of {vocab}: "
            "it was tokenised for another model"
        )
    num_bytes = tokens.num_bytes
    if limit_tokens is not None and limit_tokens < tokens.num_tokens - 1:
        if tokenizer is None:
            raise ValueError("give the tokenizer with limit_tokens, to count the bytes of these tokens")
        num_bytes = _bytes_of(tokenizer, tokens, limit_tokens + 1)
    total = min(limit_tokens or tokens.num_tokens, tokens.num_tokens - 1)
    nll, predicted = _summed_loss(
        model,
        windows(tokens, context, limit_tokens),
        batch_size or max(1, TOKENS_PER_BATCH // context),
        (lambda done: progress(done, total)) if progress is not None else (lambda done: None),
    )
    return Evaluation(
        bpb=nll / math.log(2) / num_bytes,
        perplexity=math.exp(min(nll / predicted, 700.0)),
        nll_nats=nll,
        tokens=predicted,
        bytes=num_bytes,
        context=context,
        replaced_characters=replaced,
    )


@torch.no_grad()
def _summed_loss(
    model: nn.Module, rows: Iterator[Tensor], batch_size: int, report: Callable[[int], None]
) -> tuple[float, int]:
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, predicted = 0.0, 0
    try:
        for batch in _batched(rows, batch_size):
            ids = batch.to(device)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            total += losses.double().sum().item()
            predicted += losses.numel()
            report(predicted)
    finally:
        model.train(training)
    return total, predicted


def _batched(rows: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Stacks of up to `size` windows of equal length; only the last window is shorter."""
    rows = iter(rows)
    while group := list(islice(rows, size)):
        whole = [row for row in group if len(row) == len(group[0])]
        yield torch.stack(whole)
        for rest in group[len(whole) :]:
            yield rest[None]


def evaluate_path(
    path: str | os.PathLike[str],
    text: str | os.PathLike[str],
    *,
    split: Split = "validation",
    limit_tokens: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Score a run folder, a checkpoint or an exported directory on a text file, a token file or a dataset.

    The context is the model's own. An unfinished run is represented by its newest checkpoint. text: a .txt, .xz or
    .gz file, a .bin file in a dataset folder, a dataset folder, or "austen"; split: which part of the latter two.

    Raises: ValueError if either can't be used, or the tokens were made by another tokenizer.
    """
    model, tokenizer, of = open_model(path)
    context = model_context(model)
    tokens, replaced = _open_text(text, tokenizer, split)
    options: dict[str, Any] = {
        "context": context,
        "tokenizer": tokenizer,
        "limit_tokens": limit_tokens,
        "batch_size": batch_size,
        "progress": progress,
    }
    found = asdict(evaluate(model, tokens, **options)) | {"replaced_characters": replaced, "of": of}
    guides = [m for m in model.modules() if getattr(m, "guide", None) is not None]
    if guides:
        for layer in guides:
            layer.guide_alpha.fill_(0.0)  # pyright: ignore
        found["bpb_structured"] = evaluate(model, tokens, **options).bpb
    return Evaluation(**found)


def open_model(path: str | os.PathLike[str]) -> "tuple[PreTrainedModel, Tokenizer, str]":
    """(float32 model, tokenizer, what was opened) of a run folder, a checkpoint or a model directory.

    A checkpoint of the guided phase gives the guided model, at the guide's share of then.
    """
    from lamella.hub import load_model

    folder = Path(path)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: give a run, a checkpoint or an exported model")
    if (folder / "state.json").exists():
        return _open_checkpoint(folder), load_tokenizer(folder.parent.parent), str(folder)
    if (folder / "config.yaml").exists() and not (folder / "result.json").exists():
        if not checkpoint_paths(folder / "checkpoints"):
            raise RunError(f"{folder} has no checkpoint yet: nothing to load")
        notes: list[str] = []
        newest = latest_checkpoint(folder / "checkpoints", notes.append)
        assert newest is not None
        of = f"{newest.path} (the run is not finished)" + "".join(f"; {note}" for note in notes)
        return _open_checkpoint(newest.path), load_tokenizer(folder), of
    if (folder / "config.yaml").exists():
        folder = folder / "model"
    return load_model(folder, dtype=torch.float32).eval(), load_tokenizer(folder), str(folder)


def model_context(model: nn.Module) -> int:
    """The longest sequence a model's config allows.

    Raises: ValueError if it says nothing of it.
    """
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise ValueError(f"the config of {type(model).__name__} has no max_position_embeddings")
    return context


def _open_checkpoint(folder: Path) -> "PreTrainedModel":
    from lamella.hub import build_model, load_config
    from lamella.nn import guide_

    checkpoint = read_checkpoint(folder)
    model = build_model(load_config(folder), dtype=torch.float32)
    if checkpoint.state.guide is not None:
        guide = guide_(model, checkpoint.state.guide["steps"], checkpoint.state.guide["schedule"])
        guide.load_state_dict(checkpoint.state.guide)
    checkpoint.restore(model)
    return model.eval()


def _open_text(
    text: str | os.PathLike[str], tokenizer: "Tokenizer", split: Split
) -> tuple[Tokens, int | None]:
    path = Path(text)
    is_split_file = path.suffix == ".bin"
    if is_split_file:
        split = path.stem  # pyright: ignore
        path = path.parent
    if not (is_split_file or str(text) == "austen" or path.is_dir()):
        return _tokenized(tokenizer, read_text(path), str(path))
    if str(text) == "austen":
        from lamella.data import austen

        return _tokenized(tokenizer, austen(split), f"austen {split}")
    dataset = open_dataset(path)
    if tokenizer_digest(dataset.tokenizer) != tokenizer_digest(tokenizer):
        raise DataError(
            f"{text} was tokenised by {dataset.tokenizer_spec!r}, which is not the model's tokenizer: "
            "give the text itself"
        )
    tokens = getattr(dataset, split, None)
    if not isinstance(tokens, Tokens):
        raise DataError(f"{path} has no {split} split. Splits: train, validation, test (where it was made).")
    return tokens, None


def _tokenized(tokenizer: "Tokenizer", text: str, name: str = "the text") -> tuple[Tokens, int]:
    """(tokens, how many characters became the unknown token)."""
    ids, num_bytes = encode_text(tokenizer, text)
    tokens = Tokens(ids, num_bytes=num_bytes, vocab_size=tokenizer.get_vocab_size(), name=name)
    unknown = getattr(tokenizer.model, "unk_token", None)
    if unknown is None:
        return tokens, 0
    return tokens, max(0, int((ids == tokenizer.token_to_id(unknown)).sum()) - text.count(unknown))


def _bytes_of(tokenizer: "Tokenizer", tokens: Tokens, count: int) -> int:
    """The bytes of text that the first `count` tokens stand for."""
    ids = tokens.ids[:count]
    try:
        return int(token_bytes(tokenizer)[ids].sum())
    except DataError:
        return len(tokenizer.decode(ids.tolist(), skip_special_tokens=False).encode())
