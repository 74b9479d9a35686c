"""Check the model of the protocol: exhaustively, and without one rule at a time.

    python tests/model/check.py            # all of it, a table
    NUMBA_EP_LONG=1 python tests/model/check.py   # larger configurations as well

Needs `spin` (6.5) and a C compiler. Every configuration in `SOUND` must pass: no
assertion fails and no process is left waiting, in any order of events. Every variant in
`VARIANTS` drops a rule of the protocol, and the checker must find what comes of it:

invariant               macro                        what the checker finds
 1 data before tail     TAIL_FIRST                   a slot is read too early
                        ROW_COUNTER_FIRST            a row is read too early
 2 drained before reuse LAST_CREDIT_FORGOTTEN        hang: the next sender has no credit
                        REUSE_EARLY                  nothing: invariant 3 is enough
                        REUSE_EARLY, MEET_LATE       an unread slot is overwritten
 3 rows open every      MEET_LATE                    an unread slot is overwritten, if
   operation                                         rings change shape
                        ONE_ROW_AREA                 an unread row is overwritten
                        VERDICT_FROM_UNEQUAL_PARTS   hang: one rank alone refuses
                        REFUSAL_NOT_CONSUMED         an unread row is overwritten
 4 slots                SLOT_FROM_POLLED_WORD        hang: waits for rows that have come
                        UP_TO_TAIL                   hang: leaves before its rows come
                        (a chunk that wraps)         a stale slot is read, for the row
                                                     went to the slot behind the ring
 5 state persists       CURSOR_NOT_MOVED             a stale slot is read
 6 commit last          COMMIT_FIRST                 half an entry is taken
                        FIFO_OVERWRITE               an entry is lost
                        FREE_FIRST                   an entry is lost
                        TICKET_NOT_ATOMIC            an entry is lost
                        RESERVED_NOT_COMMITTED       hang
 7 no head-of-line      BLOCKING_SENDER              hang in combine
   blocking             HEAD_OF_LINE                 nothing, as long as queues move;
                                                     where a peer has stopped, others
                                                     are not told
 8 waits are bounded    NO_CLOCK                     hang
                        NO_ABORT_CHECK               hang, or a second clock is needed
                        NO_ABORT_WORDS               hang, or a second clock is needed
 9 destroy is           FREE_WITHOUT_FAREWELL        a write to freed memory
   collective           FREE_BEFORE_REAPED           a write to freed memory
                        FAREWELL_ON_ONE_QUEUE        a write to freed memory
                        FAREWELL_BEFORE_DRAINED      a write to freed memory

10 (own rows are not posted) is built in; 11 (bitwise equal sums) is no matter of order.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
LONG = os.environ.get("NUMBA_EP_LONG") == "1"
SECONDS = 900 if LONG else 120  # a run
MEGABYTES = 5000
DEPTH = 20_000

# What the checker says of a fault, and what it means.
FAULTS = {
    "hang": r"invalid end state",
    "an entry of the FIFO is lost or torn": r"violated.*popped",
    "an overwritten unread slot": r"violated.*receive\[\(there\+k\)\]==0",
    "a stale slot is read": r"violated.*receive\[p\]==",
    "an overwritten unread row": r"violated.*row\[there\]==0",
    "a stale row is read": r"violated.*rows/32",
    "a write to freed memory": r"violated.*freed",
    "a second clock is needed": r"violated.*clock_used",
}
NOTHING = "nothing"


class Run(NamedTuple):
    """One run of the checker: a model and its macros."""

    model: str
    macros: dict[str, object]

    def without(self, *macros: str, **values: object) -> Run:
        """The same with these macros, which drop a rule."""
        return self._replace(macros=self.macros | dict.fromkeys(macros, 1) | values)


class Outcome(NamedTuple):
    """What a run found, one of `FAULTS` or nothing, and what it took."""

    found: str
    states: int
    seconds: float
    megabytes: float


def protocol(
    routes: list[list[int]],
    kinds: str,
    capacity: list[int],
    chunk: list[int],
    channel: int = 0,
    fifo_depth: int = 1,
    queue_depth: int = 1,
    **macros: object,
) -> Run:
    """A run of protocol.pml.

    routes: by rank and token, the set of ranks it goes to, one bit each. kinds: one
    operation each, D(ispatch), (cac)H(ed dispatch), C(ombine).
    """
    names = {"D": "DISPATCH", "H": "CACHED", "C": "COMBINE"}
    shape: dict[str, object] = {
        "N": len(routes),
        "T": len(routes[0]),
        "ROUTE": _array(mask for tokens in routes for mask in tokens),
        "OPERATIONS": len(kinds),
        "KIND": _array(names[kind] for kind in kinds),
        "CAPACITY": _array(capacity),
        "CHUNK": _array(chunk),
        "MAX_CAPACITY": max(capacity),
        "CHANNEL": channel,
        "FIFO_DEPTH": fifo_depth,
        "QUEUE_DEPTH": queue_depth,
        "PARKED": 6,
        "WORST": 99,
        "REFUSER": 9,
        "REFUSED": 9,
    }
    return Run("protocol.pml", shape | macros)


def _array(values: Iterable[object]) -> str:
    return "{" + ",".join(str(value) for value in values) + "}"


# Two ranks. With channel 1, rows and tokens travel on different queues.
THREE_OPERATIONS = protocol([[3, 2], [1, 3]], "DHC", [2, 4, 2], [1, 2, 1], channel=1)
FULL_RINGS = protocol([[2, 2, 2], [1, 1, 1]], "DHC", [2] * 3, [1] * 3, channel=1)
CHUNKS_OF_TWO = protocol([[2] * 5, [1, 1, 1, 0, 0]], "DC", [4, 4], [2, 2], channel=1)
NEW_SHAPE = protocol([[2] * 3, [2, 1, 0]], "DH", [2, 4], [1, 2], channel=1)
NO_TOKENS_ONE_WAY = protocol([[1, 1], [3, 2]], "DC", [2, 2], [1, 1])
REFUSED = protocol([[2, 2], [3, 0]], "DDC", [2] * 3, [1] * 3, REFUSER=1, REFUSED=0)
TOO_MANY = protocol([[2, 2], [3, 0]], "DC", [2, 2], [1, 1], WORST=2)
IN_TOKEN_ORDER = protocol([[3, 2, 2], [3, 1, 1]], "C", [2], [1])
SMALL = protocol([[2, 2], [1, 3]], "DC", [2, 2], [1, 1], channel=1)
DIES = SMALL.without(STOPS=1)
GIVES_UP = SMALL.without(GIVES_UP=1)
# Three ranks.
RING = [[6], [5], [3]]
THREE_RANKS = protocol(RING, "D", [2], [1])
THREE_RANKS_BOTH = protocol(RING, "DC", [2, 2], [1, 1], EAGER_PROXY=1)
THREE_IN_ORDER = protocol([[6, 2], [4, 1], [1, 3]], "C", [2], [1], EAGER_PROXY=1)
ONE_OF_THREE_DIES = protocol(RING, "D", [2], [1], EAGER_PROXY=1, STOPS=2)

SOUND = {
    "FIFO of 1": Run("fifo.pml", {"DEPTH": 1}),
    "FIFO of 2": Run("fifo.pml", {"DEPTH": 2}),
    "FIFO, abort": Run("fifo.pml", {"DEPTH": 2, "ABORTS": 1}),
    "three operations": THREE_OPERATIONS,
    "three operations, no cycle": THREE_OPERATIONS.without(CYCLES=1),
    "full rings": FULL_RINGS,
    "chunks of two": CHUNKS_OF_TWO,
    "new shape": NEW_SHAPE,
    "no tokens one way": NO_TOKENS_ONE_WAY,
    "refused": REFUSED,
    "too many tokens": TOO_MANY,
    "in token order": IN_TOKEN_ORDER,
    "a rank dies": DIES,
    "a rank gives up": GIVES_UP,
    "3 ranks": THREE_RANKS,
    "3 ranks, two operations": THREE_RANKS_BOTH,
    "3 ranks, in token order": THREE_IN_ORDER,
    "3 ranks, one dies": ONE_OF_THREE_DIES,
}

# Minutes, and more memory.
if LONG:
    SOUND |= {
        "3 ranks, FIFO": protocol(RING, "DC", [2, 2], [1, 1]),
        "3 ranks, one gives up": protocol(
            [[2], [0], [0]], "D", [2], [1], EAGER_PROXY=1, GIVES_UP=2
        ),
        "3 ranks, two channels": protocol(
            RING, "DC", [2, 2], [1, 1], channel=1, EAGER_PROXY=1
        ),
        "3 ranks, chunks of two": protocol(
            [[6, 6, 6], [5, 0, 0], [3, 0, 0]], "C", [4], [2], EAGER_PROXY=1
        ),
        "deeper FIFO and queues": protocol(
            [[3, 2], [1, 3]],
            "DHC",
            [2, 4, 2],
            [1, 2, 1],
            channel=1,
            fifo_depth=2,
            queue_depth=2,
        ),
    }

TWO = Run("fifo.pml", {"DEPTH": 2})
ENTRY = "an entry of the FIFO is lost or torn"
SLOT, ROW = "an overwritten unread slot", "an overwritten unread row"
STALE, STALE_ROW = "a stale slot is read", "a stale row is read"
FREED, CLOCK = "a write to freed memory", "a second clock is needed"
DIES_QUICKLY = protocol(RING, "D", [2], [1], STOPS=2)
# Each waits for a row of the next, who is busy with the one after that.
ROUND_ABOUT = protocol([[2, 4, 4, 4], [4, 1, 1, 1], [1, 2, 2, 2]], "C", [2], [1])

VARIANTS: dict[str, tuple[Run, str]] = {
    "TAIL_FIRST": (FULL_RINGS, STALE),
    "ROW_COUNTER_FIRST": (FULL_RINGS, STALE_ROW),
    "LAST_CREDIT_FORGOTTEN": (THREE_OPERATIONS, "hang"),
    "REUSE_EARLY": (FULL_RINGS, NOTHING),
    "REUSE_EARLY MEET_LATE": (FULL_RINGS, SLOT),
    "MEET_LATE": (NEW_SHAPE, SLOT),
    "MEET_LATE (same shape)": (FULL_RINGS, NOTHING),
    "ONE_ROW_AREA": (REFUSED, ROW),
    "VERDICT_FROM_UNEQUAL_PARTS": (TOO_MANY, "hang"),
    "REFUSAL_NOT_CONSUMED": (REFUSED, ROW),
    "SLOT_FROM_POLLED_WORD": (FULL_RINGS, "hang"),
    "UP_TO_TAIL": (THREE_OPERATIONS, "hang"),
    "(a chunk that wraps)": (
        CHUNKS_OF_TWO.without(CAPACITY="{3,3}", MAX_CAPACITY=3),
        STALE,
    ),
    "CURSOR_NOT_MOVED": (FULL_RINGS, STALE),
    "COMMIT_FIRST": (TWO, ENTRY),
    "FIFO_OVERWRITE": (TWO, ENTRY),
    "FREE_FIRST": (TWO, ENTRY),
    "TICKET_NOT_ATOMIC": (TWO, ENTRY),
    "RESERVED_NOT_COMMITTED": (TWO, "hang"),
    "BLOCKING_SENDER": (IN_TOKEN_ORDER, "hang"),
    "BLOCKING_SENDER (3 ranks)": (ROUND_ABOUT, "hang"),
    "HEAD_OF_LINE": (DIES_QUICKLY, CLOCK),
    "HEAD_OF_LINE (nobody stops)": (THREE_OPERATIONS, NOTHING),
    "NO_CLOCK": (DIES, "hang"),
    "NO_ABORT_CHECK": (GIVES_UP, "hang"),
    "NO_ABORT_CHECK (3 ranks)": (DIES_QUICKLY, CLOCK),
    "NO_ABORT_WORDS": (GIVES_UP, "hang"),
    "NO_ABORT_WORDS (3 ranks)": (DIES_QUICKLY, CLOCK),
    "FREE_WITHOUT_FAREWELL": (THREE_OPERATIONS, FREED),
    "FREE_BEFORE_REAPED": (THREE_OPERATIONS, FREED),
    "FAREWELL_ON_ONE_QUEUE": (THREE_OPERATIONS, FREED),
    "FAREWELL_BEFORE_DRAINED": (THREE_OPERATIONS, FREED),
}


def missing_tool() -> str | None:
    """What is missing to run the checker, if anything."""
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    return None


def variant(name: str) -> tuple[Run, str]:
    """The run of a variant, and what it has to find."""
    run, expected = VARIANTS[name]
    return run.without(*re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", name)), expected


def check(run: Run) -> Outcome:
    """Explore all states; raises RuntimeError where that was not possible."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="numba_ep-model-") as folder:
        macros = [f"-D{name}={value}" for name, value in run.macros.items()]
        _call(["spin", "-a", *macros, str(HERE / run.model)], folder)
        # With -DNP any cycle counts as one without progress.
        cycles = "CYCLES" in run.macros
        search = ["-DNP"] if cycles else ["-DSAFETY"]
        limits = [f"-DMEMLIM={MEGABYTES}", "-DVECTORSZ=2048", "-DCOLLAPSE"]
        _call(["gcc", "-w", "-O1", *search, *limits, "-o", "pan", "pan.c"], folder)
        options = ["-n", f"-m{DEPTH}", *(["-l"] if cycles else [])]
        report = _call(["./pan", *options], folder)
    return _read(report, time.monotonic() - since)


def _call(command: list[str], folder: str) -> str:
    result = subprocess.run(
        command, cwd=folder, timeout=SECONDS, capture_output=True, text=True
    )
    if result.returncode != 0:
        raise RuntimeError(f"{command[0]}: {result.stdout}{result.stderr}")
    return result.stdout


def _read(report: str, seconds: float) -> Outcome:
    errors = re.search(r"errors: (\d+)", report)
    states = re.search(r"(\d+) states, stored", report)
    if not (errors and states) or "max search depth" in report:
        raise RuntimeError(report)
    if not int(errors[1]) and "Search not completed" in report:
        raise RuntimeError(f"not explored to the end:\n{report}")
    found = NOTHING
    if int(errors[1]):
        said = next(line for line in report.splitlines() if line.startswith("pan:1:"))
        found = next((f for f, text in FAULTS.items() if re.search(text, said)), said)
    memory = re.search(r"([\d.]+)\s+total actual memory", report)
    megabytes = float(memory[1]) if memory else 0.0
    return Outcome(found, int(states[1]), seconds, megabytes)


def main(wanted: list[str]) -> int:
    """Run what is named, or everything; print a table; the number of surprises."""
    reason = missing_tool()
    if reason is not None:
        print(reason)
        return 1
    runs = {name: (run, NOTHING) for name, run in SOUND.items()}
    runs |= {name: variant(name) for name in VARIANTS}
    runs = {name: runs[name] for name in wanted or runs}
    surprises = 0
    for name, (run, expected) in runs.items():
        outcome = check(run)
        surprise = outcome.found != expected
        surprises += surprise
        print(
            f"{name:<30}{outcome.states:>10} states{outcome.seconds:>7.1f} s"
            f"{outcome.megabytes:>7.0f} MB  {outcome.found}"
            + (f"  BUT EXPECTED {expected}" if surprise else ""),
            flush=True,
        )
    return surprises


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
