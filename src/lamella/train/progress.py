"""What a training run shows: a bar in a terminal, plain lines elsewhere; always on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lamella.progress import counted


class Report:
    """The progress of one run. Nothing is shown where shown is False."""

    def __init__(self, steps: int, *, shown: bool) -> None:
        self.steps = steps
        self.console = Console(stderr=True, quiet=not shown, highlight=False, markup=False, soft_wrap=True)
        self._bar: Progress | None = None

    def start(self, step: int) -> None:
        if not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
        )
        self._task = self._bar.add_task("training", total=self.steps, completed=step, facts="")
        self._bar.start()

    def say(self, text: str) -> None:
        self.console.print(text)

    @contextmanager
    def counted(self, title: str, unit: str) -> Iterator[Callable[[int, int], None] | None]:
        """A callback for other long work, see `lamella.progress.counted`; None where nothing is shown."""
        if self.console.quiet:
            yield None
            return
        with counted(title, unit) as progress:
            yield progress

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def line(
        self,
        step: int,
        loss: float,
        bpb: float,
        val_bpb: float | None,
        speed: float,
        eta_s: float,
        flops: int,
    ) -> None:
        """The facts of a logged step. bpb: of the training loss; speed: tokens per second."""
        facts = f"loss {loss:.4f}  bpb {bpb:.3f}"
        if val_bpb is not None:
            facts += f"  val bpb {val_bpb:.3f}"
        facts += f"  {speed:,.0f} tokens/s  {flops:.2e} FLOPs"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        else:
            self.say(f"step {step}/{self.steps}  {facts}  ETA {_duration(eta_s)}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
