"""What the documents show is true."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_library_example_of_the_readme_runs_and_prints_what_it_says(capsys) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    said = re.search(r"# (\d+ \d+); a dense layer has (\d+)", code)
    assert said is not None
    assert capsys.readouterr().out.strip() == said[1]
    assert int(said[2]) == 768 * 3072
    assert len(code.strip().splitlines()) <= 16


def test_the_hugging_face_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```\n(import lamella.hub\n.*?)```", text, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "lamella" in (tmp_path / "structured" / "config.json").read_text()
    assert "lamella" not in (tmp_path / "plain" / "config.json").read_text()


def test_the_files_that_the_readme_names_are_there_and_not_empty() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("## Files")[1]
    for name in re.findall(r"`((?:src|tests|docs)[\w/.]*)`|\]\(([\w/.]+)\)", table):
        path = ROOT / (name[0] or name[1])
        assert path.is_dir() or path.stat().st_size > 0, path


def test_the_examples_of_the_documents_give_what_they_show() -> None:
    shown = 0
    for path in (ROOT / "docs").glob("*.md"):
        failed, tried = doctest.testfile(str(path), module_relative=False)
        assert failed == 0, path
        shown += tried
    assert shown >= 4


def test_links_between_documents_lead_to_files() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert "://" in target or (path.parent / target).exists(), (path.name, target)
