"""The command line. Each verb imports what it needs when it runs; `--json` ends the output with one JSON line."""

import json
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser  # pyright: ignore[reportPrivateImportUsage]

from lamella import verbs
from lamella._version import __version__
from lamella.structures import suggest
from lamella.verbs import Document


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
    "eval": _function(verbs.evaluate, positional="run"),
    "generate": _function(verbs.generate, positional="run"),
    "export": _function(verbs.export, positional="run"),
    "info": _function(verbs.info),
    "prepare": _function(verbs.prepare, positional="files"),
    "bench": _function(verbs.bench),
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
