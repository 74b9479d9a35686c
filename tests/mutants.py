"""Break the code in one way after the other: the tests must notice each time.

    python tests/mutants.py                  all of them
    python tests/mutants.py --sample 6       as many, drawn by --seed (0)
    python tests/mutants.py --only "bias"    those with this in their names

Works on a copy of the checkout. A line a mutant; the exit status is 1 if one survives:
then a test is missing.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120.0  # a test that hangs has noticed, too
EPISODES = "0 24"  # of the torture


def copy_checkout(to: Path) -> None:
    """The packages and the tests, nothing that was built."""
    ignore = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "notebooks")
    shutil.copytree(ROOT, to, ignore=ignore)


def apply(mutant: Mutant, tree: Path) -> None:
    """Replace the text. Raises ValueError unless it is there exactly once."""
    path = tree / mutant.path
    text = path.read_text()
    found = text.count(mutant.old)
    if found != 1:
        raise ValueError(
            f"{mutant.name}: found {found} times in {mutant.path}, not once"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


def command(killer: str) -> list[str]:
    """What a killer's words stand for."""
    if killer == "torture":
        return [sys.executable, "tests/torture.py", *EPISODES.split(), "--timeout", "2"]
    words, _, chosen = killer.removeprefix("compiled ").partition(" -k ")
    options = ["-k", chosen] if chosen else []
    return [sys.executable, "-m", "pytest", "-qx", *words.split(), *options]


def notices(killer: str, tree: Path) -> bool:
    """Whether the killer fails on `tree`, or does not come to an end."""
    environment = {
        **os.environ,
        "NUMBA_DISABLE_JIT": "0" if killer.startswith("compiled") else "1",
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_EP_CACHE_DIR": str(tree / "cache"),
    }
    try:
        done = subprocess.run(
            command(killer), cwd=tree, env=environment, timeout=LIMIT_S,
            capture_output=True, text=True, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    if done.returncode == 5:
        raise ValueError(f"{killer}: pytest chose no test")
    return done.returncode != 0


def killed_by(mutant: Mutant) -> str:
    """The first killer that notices; "" if none does."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_checkout(tree)
        apply(mutant, tree)
        for killer in mutant.killers:
            if notices(killer, tree):
                return killer
    return ""


def sound(killers: list[str]) -> bool:
    """Whether all killers pass on the code as it is: else they prove nothing."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_checkout(tree)
        failing = [killer for killer in killers if notices(killer, tree)]
    for killer in failing:
        print(f"FAILS without any mutant: {killer}")
    return not failing


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=len(MUTANTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    return parser.parse_args()


def main() -> int:
    """Run them; returns the exit status."""
    args = parse_arguments()
    chosen = [mutant for mutant in MUTANTS if args.only in mutant.name]
    count = min(args.sample, len(chosen))
    chosen = random.Random(args.seed).sample(chosen, count)
    if not sound(sorted({killer for mutant in chosen for killer in mutant.killers})):
        return 1
    survivors = 0
    for number, mutant in enumerate(chosen, 1):
        began = time.monotonic()
        killer = killed_by(mutant)
        survivors += not killer
        verdict = f"killed by {killer}" if killer else "SURVIVED"
        took_s = time.monotonic() - began
        print(
            f"{number:3}/{count} {took_s:4.0f} s  {mutant.name}: {verdict}", flush=True
        )
    print(f"{count - survivors} of {count} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
