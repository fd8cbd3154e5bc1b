"""Ctrl-C and SIGTERM while training."""

import shlex
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from lamella.train.folder import RunFolder
from lamella.train.progress import Report


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run, after its state was saved. exit_code: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = 128 + signum


class Signals:
    """The first signal lets the step end and its state be saved, a second one kills at once.

    received: the signal's number. immediate: raise Interrupted on the spot, for when all that matters is saved.
    """

    def __init__(self, folder: RunFolder, report: Report) -> None:
        self.folder, self.report = folder, report
        self.received: int | None = None
        self.immediate_step: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        if self.immediate_step is not None:
            raise self.interrupted(self.immediate_step)
        self.report.say("stopping after this step; once more to quit at once")

    def interrupted(self, step: int) -> Interrupted:
        """The exception to raise, when the state after `step` is saved; it is recorded in stopped.json and shown."""
        assert self.received is not None
        message = f"stopped after step {step}, saved. Continue with: {resume_command(self.folder.path)}"
        self.folder.write_json("stopped.json", {"status": "interrupted", "step": step, "message": message})
        self.report.stop()
        self.report.say(message)
        return Interrupted(message, self.received)


def resume_command(run: Path) -> str:
    return f"lamella train --resume {shlex.quote(str(run))}"
