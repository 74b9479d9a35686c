"""`python -m numba_ep.test` on a pseudo-terminal: bars and tables; elsewhere, lines."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from test_command import (
    CHECKS,
    check_passed,
    compiled,
    mpirun_test,
    run,
    run_test,
    small,
)
from test_group import HIDDEN

from numba_ep.report import Lines, Screen, report_for
from numba_ep.tuning import Figure

__all__ = ["compiled"]  # a fixture of this module, too

LIMIT_S = 120.0
ESCAPE = "\x1b["
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
FIGURE = Figure(1234.4, 1.5, 1.25, 2.0, 16)


def on_terminal(*arguments: str, **variables: str) -> tuple[int, str]:
    """Exit status and everything that the command writes to a terminal of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(HIDDEN)}
    terminal = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "50"}
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "numba_ep.test", *arguments],
            env={**kept, **terminal, **variables, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        written, deadline = b"", time.monotonic() + LIMIT_S
        try:
            while part := output.read(65536):
                written += part
                assert time.monotonic() < deadline
        except OSError:
            pass  # Linux says so when the other end is closed
        finally:
            process.kill()
    return process.wait(), written.decode()


def plain(text: str) -> str:
    """Without colours and movements."""
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", text)


def check_screen(text: str, num_figures: int) -> None:
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    shown = plain(text)
    assert "0/19" in shown and "19/19" in shown
    assert f"0/{num_figures}" in shown and f"{num_figures}/{num_figures}" in shown
    tables = shown[shown.rindex("bit for bit as the reference") :]
    assert tables.count("exact") == len(CHECKS) and "WRONG" not in tables
    assert tables.count("dispatch bf16") == tables.count("combine bf16") == 1
    assert "algorithm" in tables and "wire" in tables and "raw" in tables


@pytest.mark.parametrize("choice", ["auto", "always"])
def test_bars_and_tables_on_a_terminal(choice: str) -> None:
    arguments = ["--ranks", "2", "--skip-tuning", "--progress", choice]
    status, text = on_terminal(*small(12, *arguments))
    assert status == 0, text
    check_screen(text, 3)
    assert re.search(r"passed: 19 checks on 2 ranks in [\d.]+ s\s*$", plain(text))


@pytest.mark.parametrize("how", [["--progress", "never"], ["dumb"]])
def test_lines_where_a_terminal_can_or_should_do_no_more(how: list[str]) -> None:
    more = [] if how == ["dumb"] else how
    variables = {"TERM": "dumb"} if how == ["dumb"] else {}
    arguments = small(12, "--ranks", "1", "--skip-tuning", *more)
    status, text = on_terminal(*arguments, **variables)
    assert status == 0 and ESCAPE not in text
    assert text.splitlines()[1].split() == ["layout", "exact"]


def test_bars_under_mpirun_when_asked_for() -> None:
    """mpirun gives its ranks a pipe; what they write reaches the terminal all the same.
    """
    arguments = small(12, "--skip-tuning", "--progress")
    done = mpirun_test(2, *arguments, "always")
    assert done.returncode == 0 and done.stderr == ""
    check_screen(done.stdout, 3)
    check_passed(mpirun_test(2, *arguments, "auto"), 2)


def test_rich_is_loaded_for_a_terminal_only() -> None:
    code = "import sys; from numba_ep.test import main; main(sys.argv[1:]); "
    code += "print('rich' in sys.modules)"
    command = [sys.executable, "-c", code, *small(12, "--ranks", "1", "--skip-tuning")]
    assert run(command).stdout.endswith("False\n")
    assert run([*command, "--progress", "always"]).stdout.endswith("True\n")


def test_the_cursor_comes_back_after_an_error() -> None:
    arguments = ["--ranks", "2", "--num-topk", "13"]
    status, text = on_terminal(*small(12, *arguments))
    assert status == 1
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert "ValueError: num_topk: expected 1 to 12" in text
    done = run_test(*small(12, *arguments))
    assert done.returncode == 1 and ESCAPE not in done.stdout + done.stderr


# The two reports alone.


def report(into: Lines, wrong: dict[int, str]) -> None:
    with into:
        into.say("[not a tag] sizes")
        into.checks_begin(2)
        into.check("layout", {})
        into.check("dispatch/fp8/topk", wrong)
        into.times_begin(1)
        into.time("dispatch fp8", FIGURE)
        into.best("dispatch fp8", FIGURE)
        into.end(not wrong, "2 checks")


def test_lines_of_a_report() -> None:
    lines: list[str] = []
    report(Lines(lines.append), {1: "recv_x: row 3"})
    assert lines == [
        "[not a tag] sizes",
        "  layout                   exact",
        "  dispatch/fp8/topk        WRONG",
        "    rank 1: dispatch/fp8/topk: recv_x: row 3",
        "                   chunk   time us  algorithm    wire     raw   GB/s a rank",
        "  dispatch fp8        16      1234      1.500   1.250   2.000",
        "      best            16      1234      1.500   1.250   2.000",
        "FAILED: 2 checks",
    ]


def test_what_is_wrong_stands_out_on_a_screen() -> None:
    from rich.console import Console

    file = io.StringIO()
    report(Screen(Console(file=file, force_terminal=True, width=90)), {1: "row 3 [x]"})
    text = file.getvalue()
    assert "[not a tag] sizes" in text
    assert "rank 1: dispatch/fp8/topk: row 3 [x]" in plain(text)
    assert "\x1b[1;31mWRONG" in text and "\x1b[1;31mFAILED" in text
    assert "\x1b[32mexact" in text and "\x1b[1;32mdispatch fp8 best" in text


def test_only_the_first_rank_reports(capsys: pytest.CaptureFixture[str]) -> None:
    report(report_for(False, "always"), {})
    assert capsys.readouterr().out == ""
