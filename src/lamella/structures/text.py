"""The text form of structures."""

import ast
from dataclasses import fields

from lamella.structures import families
from lamella.structures.names import suggest
from lamella.structures.structure import Structure

FAMILIES: dict[str, type[Structure]] = {
    "Dense": families.Dense,
    "LowRank": families.LowRank,
    "BlockDense": families.BlockDense,
    "BlockShuffle": families.BlockShuffle,
    "Monarch": families.Monarch,
    "BTT": families.BTT,
    "Kronecker": families.Kronecker,
    "TensorTrain": families.TensorTrain,
    "Einsum": families.Einsum,
}


def parse_structure(text: str) -> Structure:
    """The structure whose text form is given, e.g. "BlockDense(num_blocks=4, rank_frac=0.25)".

    Only literals are read; nothing is evaluated. A bare family name means its defaults.

    Raises: ValueError naming the unknown family or option, with the nearest known one.
    """
    if not isinstance(text, str):
        raise _unreadable(text)
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(text) from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise _unreadable(text)
    name = call.func.id
    if name not in FAMILIES:
        raise ValueError(
            f"unknown structure {name!r}{suggest(name, FAMILIES)}. Known: {', '.join(FAMILIES)}."
        )
    family = FAMILIES[name]
    known = [field.name for field in fields(family)]
    options = f"{name} takes {', '.join(known) or 'no options'}"
    if call.args:
        raise ValueError(f"{text!r}: options are given by name; {options}")
    values = {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise ValueError(
                f"{text!r}: unknown option {keyword.arg!r}{suggest(str(keyword.arg), known)}; {options}"
            )
        if keyword.arg in values:
            raise ValueError(f"{text!r}: {keyword.arg} is given twice")
        try:
            values[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise ValueError(f"{text!r}: {keyword.arg} must be a literal value; {options}") from None
    try:
        return family(**values)
    except TypeError as error:
        raise ValueError(f"{text!r}: {str(error).split('__init__() ')[-1]}; {options}") from None


def _unreadable(text: object) -> ValueError:
    return ValueError(
        f"can't read the structure {text!r}: write it like LowRank(rank=192) or BTT(gamma=16, rho=4)"
    )
