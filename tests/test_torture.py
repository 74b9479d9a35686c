"""2,000 random operations over a network at its worst, 50,000 where LONG."""

import pytest
import torture
from conftest import LONG

from transport.jit import JIT_DISABLED

EPISODES = 1250 if LONG else 5 if JIT_DISABLED else 50


@pytest.mark.parametrize("seed", range(EPISODES))
def test_an_episode(seed: int) -> None:
    """The seed is the test's name; `python tests/torture.py SEED` repeats it."""
    torture.run_episode(seed)


def test_enough_of_everything() -> None:
    """What the seeds draw: every kind of operation, cuts of both kinds, tiny queues."""
    episodes = [torture.episode(seed) for seed in range(50)]
    kinds = [kind for e in episodes for kind, _ in e.operations]
    assert len(kinds) == 2000
    assert all(kinds.count(kind) > 200 for kind in torture.KINDS)
    faults = [e.faults for e in episodes]
    cuts = [f.cut_tells for f in faults if f.cut_rank >= 0]
    assert len(cuts) >= 4
    assert len(set(cuts)) == 2
    assert any((f.send_queue, f.completion_queue) == (4, 8) for f in faults)
    assert {e.num_ranks for e in episodes} == {1, 2, 3, 4, 5}
