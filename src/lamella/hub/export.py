"""Export: a Hugging Face directory that others can load, verified from a fresh process before it appears."""

import copy
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lamella.hub import verify_export
from lamella.hub.quiet import no_progress_bars
from lamella.hub.sharing import unshare_
from lamella.nn import merge_, structured_layers

# Largest absolute logit difference accepted, by the dtype of the weights: merging rounds each entry of a product once.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-1}
VERIFY_TOKENS = 64
VERIFY_SEED = 0
VERIFY_TEXT = "It is a truth universally acknowledged, that a test is a test."
END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")


def export(
    model: PreTrainedModel,
    tokenizer: Tokenizer | PreTrainedTokenizerBase | None,
    out: str | os.PathLike[str],
    structured: bool = False,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Write a model and its tokenizer as a Hugging Face directory; the model itself is not changed.

    Merged (the default) it is an ordinary dense model that transformers 4.57 and 5 load without lamella; structured
    it keeps the factors and needs `import lamella.hub`. It is written aside, checked in a fresh process against
    this model's logits on a fixed random batch, in float32, and only then takes its name.
    tolerance: largest absolute logit difference accepted; by default 1e-3, and for 16-bit weights, whose products
    are rounded when merged, 2e-2 (float16) or 2e-1 (bfloat16).

    Returns: path, structured, max_logit_difference (absolute, in float32), tolerance, parameters, bytes, files.
    Raises: ValueError if `out` exists and is not empty or can't be written, the model is guided or already
    quantised by another method, or the exported directory disagrees; then nothing is left behind.
    """
    out = Path(out).absolute()
    _check_out(out)
    layers = structured_layers(model)
    guided = [name for name, layer in layers.items() if layer.guide is not None]
    if guided:
        raise ValueError(f"{guided[0]} is guided: call remove() on its Guide before exporting")
    if structured and not layers:
        raise ValueError(
            "the model has no structured layers, so a structured export has no effect: leave it out"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the model is quantised; export it before quantising it")
    if tolerance is None:
        tolerance = TOLERANCES.get(model.dtype, 1e-3)
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be a positive number, got {tolerance!r}")
    fast = fast_tokenizer(tokenizer, model) if isinstance(tokenizer, Tokenizer) else tokenizer

    shipped = copy.deepcopy(model).cpu().eval()
    expected = _expected(shipped)
    if layers and not structured:
        unshare_(shipped)  # what is merged is shared no more
        merge_(shipped)
    if fast is not None:
        _set_special_tokens(shipped, fast)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise ValueError(f"can't write to {out.parent}: {error}") from error
    try:
        try:
            write_directory(shipped, fast, aside)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"can't write {out}: {error}; nothing was written") from error
        difference = _verify(aside, expected, structured and bool(layers), fast)
        if not difference <= tolerance:
            raise ValueError(
                f"the exported model's logits differ by up to {difference:.3g}, more than tolerance={tolerance:g}; "
                "nothing was written"
            )
        aside.chmod(0o755)  # mkdtemp's is private
        _sync(aside)
        os.replace(aside, out)
        _sync_folder(out.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    files = sorted(p.name for p in out.iterdir())
    return {
        "path": str(out),
        "structured": structured,
        "max_logit_difference": difference,
        "tolerance": tolerance,
        "parameters": shipped.num_parameters(),
        "bytes": sum((out / name).stat().st_size for name in files),
        "files": files,
    }


def write_directory(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: str | os.PathLike[str]
) -> None:
    """Write a model and its tokenizer into an existing folder, such that transformers 4.57 and 5 read both."""
    folder = Path(folder)
    with no_progress_bars():
        model.save_pretrained(folder)
    _widen_config(folder / "config.json")
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder)


def _check_out(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} exists and is not empty: give a new directory")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a new directory")


def fast_tokenizer(tokenizer: Tokenizer, model: PreTrainedModel) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it, for a model's context.

    Raises: ValueError if it has more tokens than the model.
    """
    vocab = tokenizer.get_vocab_size()
    if vocab > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab} tokens and the model {model.config.vocab_size}: is it another model's?"
        )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    end = next((token for token in END_OF_TEXT if token in known), None)
    special = {} if end is None else {"eos_token": end}
    longest = getattr(model.config, "max_position_embeddings", None)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, clean_up_tokenization_spaces=False, **special
    )


def _set_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    for name, value in ids.items():
        setattr(model.config, name, value)
    if model.can_generate():
        kept = model.generation_config.to_diff_dict()
        for name in (*ids, "_from_model_config", "transformers_version"):
            kept.pop(name, None)
        model.generation_config = GenerationConfig(**kept, **ids)


def _widen_config(file: Path) -> None:
    """Say also in transformers 4's words what transformers 5 wrote in its own."""
    config = json.loads(file.read_text("utf-8"))
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        if "partial_rotary_factor" in rope:
            config.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
        if rope.get("rope_type", "default") != "default":
            scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
            config.setdefault("rope_scaling", scaling)
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":  # which transformers 4 doesn't know
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


@torch.no_grad()
def _expected(model: PreTrainedModel) -> dict[str, Tensor]:
    """A fixed batch by the model's argument name, and its output in at least float32 as "expected"."""
    generator = torch.Generator().manual_seed(VERIFY_SEED)
    name, config = model.main_input_name, model.config
    if name == "input_ids":
        length = min(VERIFY_TOKENS, getattr(config, "max_position_embeddings", None) or VERIFY_TOKENS)
        batch = torch.randint(config.get_text_config().vocab_size, (2, length), generator=generator)
    elif name == "pixel_values":
        side = config.image_size
        batch = torch.randn(2, config.num_channels, side, side, generator=generator)
    else:
        raise ValueError(f"can't verify a model whose input is {name}")
    reference = model if model.dtype in (torch.float32, torch.float64) else copy.deepcopy(model).float()
    output = reference(**{name: batch.to(reference.dtype) if batch.is_floating_point() else batch})
    logits = output.logits if hasattr(output, "logits") else output[0]
    return {name: batch, "expected": logits.contiguous()}


def _verify(
    folder: Path, batch: dict[str, Tensor], structured: bool, tokenizer: PreTrainedTokenizerBase | None
) -> float:
    """The largest logit difference, from a fresh process that can import lamella only for a structured model."""
    text = (
        []
        if tokenizer is None
        else [VERIFY_TEXT, json.dumps(tokenizer(VERIFY_TEXT, verbose=False)["input_ids"])]
    )
    with tempfile.TemporaryDirectory(prefix="lamella-verify-") as scratch:
        file = Path(scratch) / "batch.safetensors"
        save_file(batch, file)
        kind = "structured" if structured else "plain"
        command = [sys.executable, "-P", verify_export.__file__, str(folder), str(file), kind, *text]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=scratch, check=False
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"the exported model can't be loaded in a fresh process: {reason}")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    if report["wrong_keys"]:
        raise ValueError(f"the exported weights have wrong keys: {', '.join(report['wrong_keys'][:10])}")
    if not report["tokenizer_agrees"]:
        raise ValueError("the exported tokenizer doesn't give the ids that this one gives")
    difference = report["largest_difference"]
    return math.inf if difference is None else float(difference)


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
