"""Faults put into the code are noticed: a sample here, all of them where LONG."""

import subprocess
import sys
from pathlib import Path

from conftest import LONG
from mutant_list import MUTANTS

HERE = Path(__file__).resolve().parent
SAMPLE, LIMIT_S = (len(MUTANTS), 3600) if LONG else (6, 400)


def test_every_mutant_still_applies() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
    for mutant in MUTANTS:
        text = (HERE.parent / mutant.path).read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.path} has changed"


def test_no_mutant_survives() -> None:
    command = [sys.executable, "mutants.py", "--sample", str(SAMPLE)]
    done = subprocess.run(
        command, cwd=HERE, timeout=LIMIT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
