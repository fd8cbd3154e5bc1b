"""Text from a model: sampling with the KV cache, streamed, and how fast it decodes."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamella.data import encode_text
from lamella.train.evaluate import model_context, open_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

Stream = Callable[[str], None]


def generate(
    model: "PreTrainedModel | str | os.PathLike[str]",
    prompt: str = "",
    *,
    tokenizer: "Tokenizer | None" = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    stream: Stream | None = None,
) -> str:
    """The text that a model writes after a prompt; the prompt is not part of it.

    model: a run folder, a checkpoint, a model directory, or a model with its tokenizer. An empty prompt stands for a
    line end. temperature 0 takes the likeliest token each time. When prompt and text outgrow the model's context,
    the model goes on from the second half of what there is. stream: called with each new piece of text.

    Raises: ValueError for values out of range, or a prompt without tokens.
    """
    _check(max_new_tokens, temperature, top_p, seed)
    if isinstance(model, str | Path | os.PathLike):
        model, tokenizer, _ = open_model(model)
    elif tokenizer is None:
        raise ValueError("give the tokenizer along with a model")
    ids, _ = encode_text(tokenizer, prompt or "\n")
    if not len(ids):
        raise ValueError(f"the prompt {prompt!r} has no tokens in this model's vocabulary")
    device = next(model.parameters()).device
    sequence = torch.tensor([ids.tolist()], device=device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    pieces = _Pieces(tokenizer, stream)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        _continue(model, sequence, max_new_tokens, sampling, pieces)
    return pieces.finish()


def _continue(
    model: "PreTrainedModel", sequence: Tensor, count: int, sampling: dict[str, Any], pieces: "_Pieces"
) -> None:
    context = model_context(model)
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    while count > 0:
        if sequence.shape[1] >= context:
            sequence = sequence[:, -max(1, context // 2) :]
        room = min(count, max(1, context - sequence.shape[1]))
        known = sequence.shape[1]
        pieces.skip_prompt()
        sequence = _generate(model, sequence, room, streamer=pieces, **sampling)
        count -= sequence.shape[1] - known
        if int(sequence[0, -1]) in ends:
            return


@torch.no_grad()
def _generate(
    model: "PreTrainedModel", sequence: Tensor, count: int, streamer: Any = None, **options: Any
) -> Tensor:
    from transformers import GenerationConfig

    ends = model.generation_config.eos_token_id
    config = GenerationConfig(
        max_new_tokens=count, use_cache=True, eos_token_id=ends, pad_token_id=0, **options
    )
    out = model.generate(  # pyright: ignore
        sequence,
        attention_mask=torch.ones_like(sequence),
        generation_config=config,
        streamer=streamer,
    )
    assert isinstance(out, Tensor)
    return out


class _Pieces:
    """Turns token ids, as transformers hands them to a streamer, into whole characters."""

    def __init__(self, tokenizer: "Tokenizer", stream: Stream | None) -> None:
        self.tokenizer, self.stream = tokenizer, stream
        self.ids: list[int] = []
        self.shown = ""
        self.prompt_next = False

    def skip_prompt(self) -> None:
        """The next ids are those of the prompt, which transformers puts first."""
        self.prompt_next = True

    def put(self, value: Tensor) -> None:
        if self.prompt_next:
            self.prompt_next = False
            return
        self.ids += value.flatten().tolist()
        if self.stream is not None:
            text = self._text()
            if not text.endswith("\ufffd"):  # half a character so far
                self._show(text)

    def end(self) -> None:
        pass

    def finish(self) -> str:
        text = self._text()
        if self.stream is not None:
            self._show(text)
        return text

    def _text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=True)

    def _show(self, text: str) -> None:
        if self.stream is not None and len(text) > len(self.shown):
            self.stream(text[len(self.shown) :])
            self.shown = text


def decode_speed(model: "PreTrainedModel", batch: int = 1, new_tokens: int = 64, repeats: int = 3) -> float:
    """Tokens per second of greedy decoding with the KV cache, for a batch of sequences; the median of `repeats`.

    Every sequence starts from one token; the time for it is included.
    """
    device = next(model.parameters()).device
    context = model_context(model)
    if new_tokens >= context:
        raise ValueError(f"new_tokens={new_tokens}: it must be below the model's context of {context}")
    start = torch.zeros(batch, 1, dtype=torch.long, device=device)
    training = model.training
    model.eval()
    options = {"do_sample": False, "min_new_tokens": new_tokens}
    try:
        _generate(model, start, min(4, new_tokens), do_sample=False)
        times = []
        for _ in range(repeats):
            _synchronize(device)
            began = time.perf_counter()
            _generate(model, start, new_tokens, **options)
            _synchronize(device)
            times.append(time.perf_counter() - began)
    finally:
        model.train(training)
    return batch * new_tokens / sorted(times)[len(times) // 2]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check(max_new_tokens: Any, temperature: Any, top_p: Any, seed: Any) -> None:
    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    rules = [
        (
            "max_new_tokens",
            max_new_tokens,
            whole(max_new_tokens) and max_new_tokens > 0,
            "a positive whole number",
        ),
        (
            "temperature",
            temperature,
            number(temperature) and (temperature == 0 or temperature >= 1e-3),
            "zero, or at least 0.001",
        ),
        ("top_p", top_p, number(top_p) and 0 < top_p <= 1, "above 0 and at most 1"),
        ("seed", seed, whole(seed) and 0 <= seed < 2**63, "a whole number from 0 on"),
    ]
    for name, value, holds, right in rules:
        if not holds:
            raise ValueError(f"{name}={value!r}: it must be {right}")
