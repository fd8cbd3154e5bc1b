"""Progress of long work: a bar in a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_S = 10.0

Report = Callable[[int, int], None]


@contextmanager
def counted(title: str, unit: str) -> Iterator[Report]:
    """A callback `report(done, total)`; `unit` is "bytes" or the plural name of what is counted."""
    if not sys.stderr.isatty():
        yield _lines(title, unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str, unit: str) -> Report:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= LINE_EVERY_S:
            last = now
            print(f"{title}: {done:,} of {total:,} {unit}", file=sys.stderr, flush=True)

    return report
