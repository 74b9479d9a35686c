"""How `python -m numba_ep.test` says what it finds: lines, or on a terminal a screen.

`Lines` prints one line a result as soon as it is there. `Screen` has a bar for each
part of the work and tables at the end; it alone loads rich.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it loads kernels, which wait for a device to be chosen
    from numba_ep.tuning import Figure

PROGRESS = ("auto", "always", "never")
COLUMNS = ("chunk", "time us", "algorithm", "wire", "raw")


class Lines:
    """Plain text for `write`, which gets one line at a time."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.say = write

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is left open."""

    def checks_begin(self, number: int) -> None:
        """`number` checks are to come."""

    def check(self, name: str, wrong: dict[int, str]) -> None:
        """One check; wrong: by rank, the ranks whose results differ, and how."""
        self.say(f"  {name:<24} {'WRONG' if wrong else 'exact'}")
        for rank, difference in wrong.items():
            self.say(f"    rank {rank}: {name}: {difference}")

    def times_begin(self, number: int) -> None:
        """`number` figures are to come."""
        chunk, time, algorithm, wire, raw = COLUMNS
        self.say(
            f"  {'':<16}{chunk:>6}{time:>10}{algorithm:>11}{wire:>8}{raw:>8}"
            "   GB/s a rank"
        )

    def time(self, name: str, figure: Figure) -> None:
        """One operation at one chunk size."""
        chunk, time, algorithm, wire, raw = _cells(figure)
        self.say(f"  {name:<16}{chunk:>6}{time:>10}{algorithm:>11}{wire:>8}{raw:>8}")

    def best(self, name: str, figure: Figure) -> None:
        """The best of several chunk sizes of the operation `name`."""
        self.time("    best", figure)

    def end(self, passed: bool, summary: str) -> None:
        """The last line: what passed on how many ranks, and how long it took."""
        self.say(f"{'passed' if passed else 'FAILED'}: {summary}")


class Screen(Lines):
    """Bars while it runs, then a table of the checks and one of the times."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Table

        super().__init__(
            lambda text: console.print(text, markup=False, highlight=False)
        )
        self.console = console
        # Drawn at each step only: a thread that redraws would take time from the ranks.
        self.bars = Progress(
            TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"), console=console, auto_refresh=False,
        )  # fmt: skip
        self.checks: dict[str, dict[str, str]] = {}
        self.times = Table(title="GB/s a rank", title_justify="right")
        self.times.add_column("operation")
        for name in COLUMNS:
            self.times.add_column(name, justify="right")

    def __enter__(self) -> Screen:
        self.bars.start()
        self._begin("kernels", 1)
        self._step("compiled by the first run, about half a minute", 0)
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()  # the cursor is shown again

    def checks_begin(self, number: int) -> None:
        """A bar for `number` checks."""
        self._step("")
        self._begin("checks", number)

    def check(self, name: str, wrong: dict[int, str]) -> None:
        """A step of the bar, a cell of the table; what is wrong is said at once."""
        operation, _, case = name.partition("/")
        word = "[bold red]WRONG[/]" if wrong else "[green]exact[/]"
        self.checks.setdefault(case, {})[operation] = word
        if wrong:
            super().check(name, wrong)
        self._step(name)

    def times_begin(self, number: int) -> None:
        """A bar for `number` figures."""
        self._begin("times", number)

    def time(self, name: str, figure: Figure) -> None:
        """A step of the bar, a line of the table."""
        self.times.add_row(name, *_cells(figure))
        self._step(f"{name}, chunk {figure.chunk}: {figure.time_us:.0f} us")

    def best(self, name: str, figure: Figure) -> None:
        """A line of the table that stands out."""
        self.times.add_row(
            f"{name} best", *_cells(figure), style="bold green", end_section=True
        )

    def end(self, passed: bool, summary: str) -> None:
        """The tables and the last line."""
        from rich.table import Table

        self.bars.stop()
        checks = Table(title="bit for bit as the reference", title_justify="right")
        operations = dict.fromkeys(op for of in self.checks.values() for op in of)
        checks.add_column("data")
        for operation in operations:
            checks.add_column(operation)
        for case, words in self.checks.items():
            checks.add_row(case, *(words.get(op, "") for op in operations))
        self.console.print(checks)
        self.console.print(self.times)
        word = "[bold green]passed[/]" if passed else "[bold red]FAILED[/]"
        self.console.print(f"{word}: {summary}", highlight=False)

    def _begin(self, name: str, number: int) -> None:
        self.bar = self.bars.add_task(name, total=number, now="")
        self.bars.refresh()

    def _step(self, now: str, steps: int = 1) -> None:
        self.bars.update(self.bar, advance=steps, now=now, refresh=True)


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    """In the order of COLUMNS."""
    return (
        str(figure.chunk), f"{figure.time_us:.0f}", f"{figure.algorithm_gbps:.3f}",
        f"{figure.wire_gbps:.3f}", f"{figure.raw_gbps:.3f}",
    )  # fmt: skip


def report_for(is_first: bool, progress: str) -> Lines:
    """The report of a rank; only the first one says anything.

    progress: "always" is for where standard output leads to a terminal that it does not
    know of, as under mpirun.
    """
    if not is_first:
        return Lines(lambda text: None)
    if progress == "always" or (progress == "auto" and sys.stdout.isatty()):
        from rich.console import Console

        console = Console(force_terminal=True if progress == "always" else None)
        if progress == "always" or not console.is_dumb_terminal:
            return Screen(console)
    return Lines(lambda text: print(text, flush=True))
