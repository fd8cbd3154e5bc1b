"""The command line. Each verb imports what it needs when it runs; `--json` ends the output with one JSON line."""

import json
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ActionConfigFile, ArgumentParser  # pyright: ignore[reportPrivateImportUsage]

from lamella._version import __version__
from lamella.structures import suggest

Document = dict[str, Any]


def _info(
    model: str = "tiny",
    structure: str | None = None,
    all_blocks: bool = False,
    context: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> Document:
    """Parameters, FLOPs and bytes of a model, from the meta device.

    Args:
        model: preset (tiny, small, s, m, l, xl), Hugging Face model directory, or config.json
        structure: structure of the FFN layers of all blocks but the first, e.g. "LowRank(rank=192)"
        all_blocks: give the first block's FFN the structure too
        context: tokens per sequence; the model's own by default
        dtype: of the weights
    """
    import torch

    from lamella.hub import account, build_model, ffn_rules, format_account, load_config
    from lamella.nn import replace_
    from lamella.structures import parse_structure

    if all_blocks and structure is None:
        raise ValueError("all_blocks has no effect without a structure")
    config = load_config(model)
    built = build_model(config, device="meta", dtype=getattr(torch, dtype))
    if structure is not None:
        replace_(built, ffn_rules(built, parse_structure(structure), all_blocks))
    result = account(built, context)
    print(format_account(result))
    return {"model": model, "structure": structure, **result.to_json()}


def _prepare(
    files: list[str],
    out: str,
    tokenizer: str = "bpe-4096",
    validation_files: list[str] = [],  # noqa: B006
    test_files: list[str] = [],  # noqa: B006
    validation_frac: float | None = None,
    test_frac: float | None = None,
    overwrite: bool = False,
) -> Document:
    """Turn text files (.txt, .xz, .gz) into a folder of memory-mapped token files.

    Args:
        files: text files, UTF-8
        out: folder to write
        tokenizer: char (96 characters), byte, or bpe-N, trained on the text
        validation_files: text for validation; else the end of the text
        test_files: text for the test split; else the part before that
        validation_frac: fraction of the text kept for validation, by default 0.01
        test_frac: fraction kept for the test, by default 0.01
        overwrite: replace a finished dataset at `out`
    """
    from lamella.data import prepare
    from lamella.progress import counted

    with counted("preparing", "bytes") as progress:
        summary = prepare(
            files,
            out,
            tokenizer=tokenizer,
            validation_files=validation_files,
            test_files=test_files,
            validation_frac=validation_frac,
            test_frac=test_frac,
            overwrite=overwrite,
            progress=progress,
        )
    for split, facts in summary["splits"].items():
        print(f"{split:>10}: {facts['tokens']:,} tokens from {facts['bytes']:,} bytes")
    print(f"wrote {out}; train on it with: lamella train --data {out}")
    return summary


def _eval(run: str, text: str, limit_tokens: int | None = None, batch_size: int = 32) -> Document:
    """Bits per byte and perplexity of a run, checkpoint or exported directory on a text or token file.

    Args:
        run: run folder, checkpoint folder or exported directory
        text: text file (.txt, .xz, .gz) or prepared token file
        limit_tokens: score only the first so many tokens
        batch_size: windows at a time
    """
    from lamella.progress import counted
    from lamella.train import evaluate_path

    with counted("evaluating", "tokens") as progress:
        result = evaluate_path(run, text, limit_tokens=limit_tokens, batch_size=batch_size, progress=progress)
    print(f"{result.bpb:.4f} bits per byte, perplexity {result.perplexity:.2f} on {result.tokens:,} tokens")
    if result.bpb_structured is not None:
        print(f"{result.bpb_structured:.4f} bits per byte of the structured layers alone, without the guide")
    if result.replaced_characters:
        print(f"{result.replaced_characters:,} characters are not in the vocabulary and were replaced")
    return result.to_json()


def _generate(
    run: str,
    prompt: str = "\n",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Document:
    """Continue a prompt, streamed as it is drawn.

    Args:
        run: run folder, checkpoint folder or exported directory
        prompt: text to continue
        max_new_tokens: tokens to draw
        temperature: 0 takes the likeliest token
        top_p: draw from the smallest set of tokens with this probability
        seed: of the draws
    """
    from lamella.train import generate

    print(prompt, end="", flush=True)
    text = generate(
        run,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stream=lambda piece: print(piece, end="", flush=True),
    )
    print()
    return {"prompt": prompt, "text": text}


def _export(run: str, out: str, structured: bool = False, tolerance: float | None = None) -> Document:
    """Write a run as a Hugging Face directory, verified from a fresh process.

    Args:
        run: run folder or checkpoint folder
        out: directory to write; must not exist
        structured: keep the factors; loading then needs lamella
        tolerance: largest logit difference accepted; by default 1e-3, more for 16-bit weights
    """
    from lamella.train import export_run

    report = export_run(run, out, structured=structured, tolerance=tolerance)
    print(f"wrote {out}; largest logit difference {report['max_logit_difference']:.3g} in a fresh process")
    return report


def _bench(
    width: int = 768,
    tokens: int = 2048,
    dtype: Literal["float32", "bfloat16"] = "float32",
    backward: bool = False,
    structures: list[str] = [  # noqa: B006
        "LowRank(rank_frac=0.25)",
        "BlockDense(num_blocks=4, rank_frac=0.25)",
        "BlockShuffle(num_blocks=4)",
        "BTT(gamma=16, phi=16, rho=8)",
        "Kronecker()",
        "TensorTrain(rho=8)",
    ],
    rounds: int = 9,
) -> Document:
    """Time structured layers against nn.Linear here, interleaved, as ratios.

    Args:
        width: d; layers d -> 4d and 4d -> d are timed
        tokens: per call
        dtype: of weights and input
        backward: time forward and backward
        structures: structures to time
        rounds: medians are over so many rounds
    """
    import torch

    from lamella.bench import machine, time_layers, to_rows
    from lamella.structures import parse_structure

    for name, value in (("width", width), ("tokens", tokens), ("rounds", rounds - 1)):
        if value < 1:
            raise ValueError(f"{name} must be {'at least 2' if name == 'rounds' else 'a positive integer'}")
    timings = time_layers(
        [parse_structure(s) for s in structures],
        [(width, 4 * width), (4 * width, width)],
        tokens=tokens,
        dtype=getattr(torch, dtype),
        backward=backward,
        rounds=rounds,
    )
    what = "forward and backward" if backward else "forward"
    about = machine()
    print(
        f"{what}, {tokens} tokens, {dtype}, {about['threads']} threads, {about['cpu']}, torch {about['torch']}"
    )
    print("| structure | shape | parameters | multiply-adds | speed-up | eff | spread |")
    print("|---|---|---|---|---|---|---|")
    for t in timings:
        print(
            f"| {t.structure} | {t.in_features} -> {t.out_features} | {t.params_frac:.1%} "
            f"| {t.multiply_adds_frac:.1%} | {t.speed_up:.2f}x{'' if t.faster else ' (slower here)'} "
            f"| {t.eff:.2f} | {t.spread:.0%} |"
        )
    for text in structures:
        if not any(t.structure == repr(parse_structure(text)) for t in timings):
            print(f"{text} fits neither {width} -> {4 * width} nor {4 * width} -> {width}: not timed")
    print(
        "eff: speed-up / (dense multiply-adds / structured). spread: between the quartiles of the speed-up."
    )
    return {"machine": about, "timings": to_rows(timings)}


@dataclass(frozen=True)
class Verb:
    """How a verb's arguments are declared and run."""

    help: str
    declare: Callable[[ArgumentParser, list[str]], None]
    run: Callable[[dict[str, Any]], Document]
    positional: str | None = None  # the option that takes words given without one


def _function(function: Callable[..., Document], positional: str | None = None) -> Verb:
    def declare(parser: ArgumentParser, argv: list[str]) -> None:
        parser.add_function_arguments(function, as_group=False)

    return Verb(
        (function.__doc__ or "").split("\n")[0], declare, lambda values: function(**values), positional
    )


def _declare_train(parser: ArgumentParser, argv: list[str]) -> None:
    from lamella.train import TrainConfig, read_config

    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these options")
    parser.add_class_arguments(TrainConfig, None)
    parser.add_argument(
        "--resume", type=str, default=None, help="run folder to continue; no other option is needed"
    )
    folder = next((argv[k + 1] for k, word in enumerate(argv[:-1]) if word == "--resume"), None)
    folder = next((word.removeprefix("--resume=") for word in argv if word.startswith("--resume=")), folder)
    if folder is not None:  # options that differ from the run's own are then seen, and refused
        stored = TrainConfig.from_dict(read_config(folder), folder)
        parser.set_defaults(stored.to_dict() | {"out": folder})


def _run_train(values: dict[str, Any]) -> Document:
    from lamella.train import TrainConfig, train

    folder = values.pop("resume")
    if folder is not None and Path(folder) != Path(values["out"]):
        raise ValueError(
            f"--resume {folder} continues that run in its folder, so --out {values['out']} can't be another"
        )
    return train(TrainConfig(**values), resume=folder is not None)


def _declare_compare(parser: ArgumentParser, argv: list[str]) -> None:
    from lamella.train import TrainConfig
    from lamella.train.compare import VARIED, CompareConfig

    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these options")
    parser.add_class_arguments(CompareConfig, None, skip={"train"})
    parser.add_class_arguments(TrainConfig, None, skip=set(VARIED))


def _run_compare(values: dict[str, Any]) -> Document:
    from dataclasses import fields

    from lamella.train import TrainConfig
    from lamella.train.compare import CompareConfig, compare

    own = {field.name: values.pop(field.name) for field in fields(CompareConfig) if field.name in values}
    return compare(CompareConfig(**own, train=TrainConfig(**values, out=own["out"])))


VERBS = {
    "train": Verb("Train one language model.", _declare_train, _run_train),
    "compare": Verb(
        "Train variants under equal training FLOPs and compare them.", _declare_compare, _run_compare
    ),
    "eval": _function(_eval, positional="run"),
    "generate": _function(_generate, positional="run"),
    "export": _function(_export, positional="run"),
    "info": _function(_info),
    "prepare": _function(_prepare, positional="files"),
    "bench": _function(_bench),
}


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> typing.NoReturn:
        unknown = re.search(r"(?:unrecognized arguments: --|key ['\"]?)([\w-]+)", message)
        known = [o for o in self._option_string_actions if o.startswith("--") and "+" not in o]
        given = f"--{unknown[1].replace('-', '_')}" if unknown else None
        hint = suggest(given, known) if given and given not in known else ""
        sys.stderr.write(f"{self.prog}: {message.strip()}{hint}\nSee {self.prog} --help\n")
        raise SystemExit(2)


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code.

    0; 1 if a compared variant failed; 2 for bad input; 130 or 143 after Ctrl-C or SIGTERM.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: lamella VERB [options]      lamella VERB --help")
        print(
            "Flags may stand alone (--guide), lists are separated by spaces, - and _ in names are the same.\n"
        )
        print("\n".join(f"  {name:<10}{verb.help}" for name, verb in VERBS.items()))
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        print(f"lamella {__version__}")
        return 0
    name = argv[0]
    if name not in VERBS:
        sys.stderr.write(
            f"lamella: unknown verb {name!r}{suggest(name, VERBS)}; there are {', '.join(VERBS)}\n"
        )
        return 2
    try:
        return _run(name, VERBS[name], argv[1:])
    except (ValueError, OSError, ImportError, MemoryError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in (
            "transformers",
            "tokenizers",
            "matplotlib",
        )
        hint = "; install it with: pip install 'lamella[lm]'" if missing else ""
        sys.stderr.write(f"lamella {name}: {error}{hint}\n")
        return 2
    except RuntimeError as error:
        if not any(
            word in str(error) for word in ("can't allocate memory", "not enough memory", "out of memory")
        ):
            raise
        first = str(error).splitlines()[0]
        sys.stderr.write(f"lamella {name}: not enough memory for these sizes ({first})\n")
        return 2


def _run(name: str, verb: Verb, argv: list[str]) -> int:
    words = f" {verb.positional.upper()} without --{verb.positional} will do." if verb.positional else ""
    parser = _Parser(prog=f"lamella {name}", description=verb.help + words, allow_abbrev=False)
    verb.declare(parser, argv)
    parser.add_argument("--json", type=bool, default=False, help="end the output with one line of JSON")
    values = parser.parse_args(_spelled_out(argv, parser, verb.positional)).as_dict()
    values.pop("config", None)
    as_json = values.pop("json")
    try:
        document = verb.run(values)
    except KeyboardInterrupt as stop:
        return getattr(stop, "exit_code", 130)
    if as_json:
        print(json.dumps(document, default=_plain))
    return 1 if document.get("failed") else 0


def _spelled_out(argv: list[str], parser: ArgumentParser, positional: str | None) -> list[str]:
    """Bare flags as `=true`, space-separated lists as one JSON list, dashes in option names as underscores."""
    types = {a.dest: getattr(a, "_typehint", None) or a.type for a in parser._actions}
    out: list[str] = []
    rest: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("--"):
            rest.append(word)
            continue
        option, equals, value = word.partition("=")
        dest = option[2:].replace("-", "_")
        kind = types.get(dest)
        following = argv[at : _next_option(argv, at)]
        if kind is bool and not equals:
            value, taken = (
                (following[0], 1) if following and following[0] in ("true", "false") else ("true", 0)
            )
        elif (
            typing.get_origin(kind) in (list, tuple) and not equals and following and following[0][:1] != "["
        ):
            value, taken = json.dumps([_number(v) for v in following]), len(following)
        elif equals or dest not in types or not following:
            out.append(f"--{dest}{equals}{value}")
            continue
        else:
            value, taken = following[0], 1
        out.append(f"--{dest}={value}")
        at += taken
    if positional and typing.get_origin(types[positional]) is list and rest:
        return [*out, f"--{positional}={json.dumps(rest)}"]
    if positional and len(rest) == 1:
        return [*out, f"--{positional}={rest[0]}"]
    return [*out, *rest]


def _next_option(argv: list[str], at: int) -> int:
    return next((k for k in range(at, len(argv)) if argv[k].startswith("--")), len(argv))


def _number(text: str) -> str | int | float:
    try:
        return json.loads(text) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", text) else text
    except json.JSONDecodeError:
        return text


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else repr(value)


if __name__ == "__main__":
    raise SystemExit(main())
