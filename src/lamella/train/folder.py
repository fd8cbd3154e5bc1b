"""The run folder: one writer at a time, and every file written aside, fsynced and renamed."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import yaml

TMP, TRASH = ".tmp-", ".trash-"


class RunError(ValueError):
    """A run folder that can't be used as asked; the message says what to do."""


class RunFolder:
    """RUN/, held by this process between `with` and its end.

    marker: the file by which the folder is known to be in use.
    Raises: RunError if the folder can't be made or written, another process holds it, or it has files that are no run.
    """

    def __init__(self, path: str | os.PathLike[str], marker: str = "config.yaml") -> None:
        self.path = Path(path)
        self.marker = marker
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.tokenizer = self.path / "tokenizer.json"
        self._lock: IO[str] | None = None
        self._made: list[Path] = []

    @classmethod
    def claimed(cls, path: str | os.PathLike[str], marker: str) -> Self:
        """A folder of something other than a single run, known by another marker, held in the same way."""
        return cls(path, marker)

    def __enter__(self) -> Self:
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+", encoding="utf-8")
        except OSError as error:
            raise RunError(f"can't write to the run folder {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise RunError(
                f"another process (pid {owner}) is writing to the run folder {self.path}: "
                "wait for it, stop it, or give another folder"
            ) from None
        try:
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()
            sweep(self.path)
            sweep(self.checkpoints)
            self._check_content()
            write_atomic(self.path / f"{TMP}probe", b"")
            (self.path / f"{TMP}probe").unlink()
        except OSError as error:
            self._release()
            raise RunError(f"can't write to the run folder {self.path}: {error.strerror}") from None
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        assert self._lock is not None
        if self._made and not self.has_run:  # nothing came of it: leave no empty folder behind
            (self.path / ".lock").unlink(missing_ok=True)
            for folder in self._made:
                with suppress(OSError):
                    folder.rmdir()
        self._lock.close()

    def _check_content(self) -> None:
        if self.has_run:
            return
        others = sorted(p.name for p in self.path.iterdir() if p.name != ".lock")
        if others:
            raise RunError(
                f"{self.path} is not empty and holds no run (there is {', '.join(others[:5])}): give another folder"
            )

    @property
    def has_run(self) -> bool:
        """Whether the folder has its marker, that is, a run was started here."""
        return (self.path / self.marker).exists()

    @property
    def config(self) -> dict[str, Any]:
        return read_config(self.path)

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of a finished run."""
        return self.read_json("result.json") if (self.path / "result.json").exists() else None

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / name} can't be read: {error}") from None
        if not isinstance(content, dict) or not content:
            raise RunError(f"{self.path / name} is damaged: it holds {content!r}")
        return content

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        write_atomic(self.path / name, json.dumps(content, indent=1).encode() + b"\n")

    def write_config(self, content: dict[str, Any]) -> None:
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomic(self.path / "config.yaml", text.encode())


class LineLog:
    """A file of JSON lines that grows; `sync` makes it durable, and a digest of all of it is at hand."""

    def __init__(self, path: Path, *, num_bytes: int = 0, sha256: str | None = None) -> None:
        """Continue after the first num_bytes bytes, and drop what follows.

        Raises: RunError if the file is shorter, or sha256 is given and is not that of those bytes.
        """
        self.path = path
        with _clear_errors(path):
            path.touch()
            with open(path, "rb") as file:
                kept = file.read(num_bytes)
            self._digest = hashlib.sha256(kept)
            if len(kept) < num_bytes or sha256 not in (None, self._digest.hexdigest()):
                raise RunError(
                    f"{path} is not what it was when the checkpoint was written: restore it, or train in a new folder"
                )
            os.truncate(path, num_bytes)
            self._file = open(path, "ab")  # noqa: SIM115
        self.num_bytes = num_bytes

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        with _clear_errors(self.path):
            self._file.write(data)
            self._file.flush()
        self._digest.update(data)
        self.num_bytes += len(data)

    def sync(self) -> None:
        with _clear_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_config(run: str | os.PathLike[str], name: str = "config.yaml") -> dict[str, Any]:
    """The content of a run folder's config.yaml, or of a comparison's compare.yaml.

    Raises: RunError if there is none or it can't be read.
    """
    file = Path(run) / name
    if not file.is_file():
        raise RunError(f"{run} is not a run folder: it has no {name}")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{file} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{file} holds no settings")
    return content


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file as a whole: after a crash at any time it has either its old or its new content."""
    aside = path.with_name(f"{TMP}{path.name}")
    with _clear_errors(path, aside):
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        fsync_folder(path.parent)


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `target`, in place of what is there, when the block ends well."""
    aside = target.with_name(f"{TMP}{target.name}")
    with _clear_errors(target, aside):
        target.parent.mkdir(parents=True, exist_ok=True)
        discard(aside)
        aside.mkdir()
        yield aside
        for file in sorted(aside.rglob("*")):
            fsync_folder(file)
        fsync_folder(aside)
        if target.exists():
            discard(target)
        os.rename(aside, target)
        fsync_folder(target.parent)


def discard(path: Path) -> None:
    """Delete a folder; half-deleted it no longer has its name."""
    if not path.exists():
        return
    trash = path.with_name(f"{TRASH}{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete what an interrupted write or delete left in a folder."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith((TMP, TRASH)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _clear_errors(path: Path, aside: Path | None = None) -> Iterator[None]:
    """Turn a failed write into a RunError, and remove what was written aside."""
    try:
        yield
    except BaseException as error:
        if aside is not None and aside.exists():
            shutil.rmtree(aside, ignore_errors=True) if aside.is_dir() else aside.unlink()
        if _disk_full(error):
            raise RunError(
                f"no space left on the disk to write {path}; what was saved before is whole: free some space, "
                "then continue with --resume"
            ) from error
        if isinstance(error, OSError):
            raise RunError(f"can't write {path}: {error.strerror or error}") from error
        raise


def _disk_full(error: BaseException) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    # safetensors reports the system's error as text
    return (
        getattr(error, "errno", None) in full or "os error 28" in str(error) or "No space left" in str(error)
    )
