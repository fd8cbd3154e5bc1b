"""The wheel that people install."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import lamella

ROOT = Path(__file__).resolve().parents[1]


def test_a_wheel_builds_installs_and_runs_with_all_that_it_needs(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(source)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("py.typed", "data/austen.txt.xz", "data/AUSTEN_NOTICE.txt", "train/demo.yaml"):
        assert f"lamella/{needed}" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if name.startswith("tests")]

    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel)],
        check=True,
    )
    code = (
        "import lamella; from lamella.data import austen; "
        "print(lamella.__file__, lamella.__version__, len(austen('test')))"
    )
    environment = dict(os.environ, PYTHONPATH=str(tmp_path / "site"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=True,
    )
    file, version, size = done.stdout.split()
    assert file.startswith(str(tmp_path))
    assert (version, int(size) > 400_000) == (lamella.__version__, True)
