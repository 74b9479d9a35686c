"""The ladder of docs/ladder.md at tiny sizes: every step is right, and is checked."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs/ladder"))

import chunks_and_credits
import numpy_loop
import run

# Rings of 4 slots: they wrap often, and credit runs out.
SIZES = "--num-tokens 13 --hidden 64 --chunk 2 --capacity 4 --repeats 2 --ranks"
TINY = SIZES.split()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_step_is_exact(
    num_ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*TINY, str(num_ranks)]) == 0
    first, _, *steps = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{num_ranks} ranks, 13 tokens a rank, hidden 64, ")
    assert [line.split()[0] for line in steps] == ["1", "2", "3", "4"]
    assert all(line.endswith("  exact") for line in steps)


def test_a_wrong_step_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = numpy_loop.dispatch

    def dispatch(*given: Any) -> list[np.ndarray]:
        received = right(*given)
        received[1][0, 0] = 0
        return received

    monkeypatch.setattr(numpy_loop, "dispatch", dispatch)
    monkeypatch.setattr(run, "STEPS", run.STEPS[:1])
    assert run.main([*TINY, "2"]) == 1
    assert capsys.readouterr().out.endswith("  WRONG\n")


def test_a_ring_never_holds_more_than_its_slots() -> None:
    ring = chunks_and_credits.Ring(4, 1, np.int64)
    rows, out = np.arange(7)[:, None], np.full((7, 1), -1)
    assert [ring.send(rows, sent, 2) for sent in (0, 2, 4)] == [2, 2, 0]
    assert (ring.tail, ring.head) == (4, 0)
    assert ring.receive(out, 0, 2) == 2 and ring.send(rows, 4, 2) == 2
    assert [ring.receive(out, read, 2) for read in (2, 4, 6)] == [2, 2, 0]
    assert ring.send(rows, 6, 2) == 1 and ring.receive(out, 6, 2) == 1
    assert out[:, 0].tolist() == list(range(7))
    assert ring.tail == ring.head == 7


def test_files_are_a_few_dozen_lines_and_the_page_shows_them() -> None:
    page = (ROOT / "docs/ladder.md").read_text(encoding="utf-8")
    for _, module, _ in run.STEPS:
        assert module.__file__ is not None
        with open(module.__file__, encoding="utf-8") as file:
            assert len(file.readlines()) < 100
        assert f"(ladder/{module.__name__}.py)" in page
