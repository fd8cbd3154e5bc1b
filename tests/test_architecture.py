"""Imports point one way, importing the package is light, and files stay readable."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lamella

PACKAGE = Path(lamella.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# what each part may import of ours; every part may import itself and the version
BELOW: dict[str, set[str]] = {"data": set(), "structures": set(), "progress": set()}
BELOW["ops"] = {"structures"}
BELOW["nn"] = BELOW["ops"] | {"ops"}
BELOW["optim"] = BELOW["health"] = BELOW["nn"] | {"nn"}
BELOW["hub"] = BELOW["nn"] | {"nn", "optim", "health", "data"}
BELOW["train"] = BELOW["bench"] = BELOW["hub"] | {"hub", "progress"}
BELOW["scaling"] = BELOW["search"] = BELOW["train"] | {"train", "bench"}
BELOW["verbs"] = BELOW["scaling"] | {"scaling", "search"}
BELOW["cli"] = BELOW["verbs"] | {"verbs"}
BELOW["__main__"] = BELOW["cli"] | {"cli"}
BELOW["__init__"] = {"structures", "ops", "nn", "optim"}
BELOW["_version"] = set()


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(node: ast.AST, file: Path) -> list[str]:
    """The full names of the modules that an import statement reads; `from a import b` may read a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        package = list(file.relative_to(PACKAGE.parent).parent.parts)
        head = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
        base = ".".join(filter(None, (head, node.module)))
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return []


def top_level_imports(file: Path) -> list[str]:
    """Those that run when the module is imported, also under if and try, but not under TYPE_CHECKING."""
    found: list[str] = []
    pending: list[ast.AST] = list(ast.parse(file.read_text("utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        found += imported(node, file)
        pending.extend(ast.iter_child_nodes(node))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_one_way(file: Path) -> None:
    part = part_of(file)
    names = [n for node in ast.walk(ast.parse(file.read_text("utf-8"))) for n in imported(node, file)]
    parts = {n.split(".")[1] for n in names if n.startswith("lamella.")} & set(BELOW)
    assert parts <= BELOW[part] | {part, "_version"}, f"{part} may import {sorted(BELOW[part])}"


def test_every_part_of_the_package_has_its_place() -> None:
    assert {part_of(file) for file in FILES} <= set(BELOW)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_only_hub_imports_transformers_when_it_is_imported(file: Path) -> None:
    heavy = {name.split(".")[0] for name in top_level_imports(file)} & {"transformers", "triton", "peft"}
    allowed = {"transformers"} if part_of(file) == "hub" else set()
    allowed |= {"triton"} if file.name.endswith("_triton.py") else set()
    assert heavy <= allowed


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_no_file_is_longer_than_400_lines(file: Path) -> None:
    assert len(file.read_text("utf-8").splitlines()) <= 400


@pytest.mark.parametrize(
    "name", ["lamella", "lamella.structures", "lamella.ops", "lamella.nn", "lamella.optim"]
)
def test_exported_names_exist_once(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, export) for export in module.__all__)


def test_importing_lamella_loads_nothing_heavy() -> None:
    heavy = ("transformers", "triton", "jsonargparse", "tokenizers", "matplotlib", "pandas", "optuna", "peft")
    code = f"import sys, lamella; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
    assert not result.stderr
