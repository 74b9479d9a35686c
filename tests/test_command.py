"""`python -m numba_ep.test` as users start it: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_group import HIDDEN, find_mpirun

LIMIT_S = 120.0
COMPILE_S = 600.0
SMALL = ("--num-tokens 13 --hidden 128 --num-topk 2 --num-experts {experts} "
         "--device cpu")  # fmt: skip
CHECKS = [
    "layout",
    *(
        f"{operation}/{data}/{topk}"
        for data in ("fp8", "bf16", "random")
        for topk in ("topk", "no-topk")
        for operation in ("dispatch", "cached", "combine")
    ),
]
FIGURES = {"time_us", "algorithm_gbps", "wire_gbps", "raw_gbps", "chunk"}


def small(num_experts: int = 12, *more: str) -> list[str]:
    return [*SMALL.format(experts=num_experts).split(), *more]


def run(
    command: list[str], limit_s: float = LIMIT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(HIDDEN)}
    return subprocess.run(
        command,
        env={**kept, **variables, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def run_test(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in one process."""
    command = [sys.executable, "-m", "numba_ep.test", *arguments]
    return run(command, LIMIT_S, **variables)


def mpirun_test(
    num_ranks: int, *arguments: str
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    launch = [find_mpirun(), "-np", str(num_ranks)]
    return run([*launch, sys.executable, "-m", "numba_ep.test", *arguments])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """No time limit of a test is spent on compiling what the cache will hold."""
    code = "import numba_ep\nnumba_ep.spawn(lambda group: "
    code += "numba_ep.Buffer(group, device='cpu').destroy(), 1)"
    done = run([sys.executable, "-c", code], COMPILE_S)
    assert done.returncode == 0, done.stderr


def check_passed(done: subprocess.CompletedProcess[str], num_ranks: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith(f"{num_ranks} ranks on cpu, transport shm: 13 tokens, ")
    assert last.startswith(f"passed: 19 checks on {num_ranks} ranks in ")
    # Printed once, by rank 0.
    assert [line.split() for line in lines[:19]] == [[name, "exact"] for name in CHECKS]
    assert "time us" in lines[19] and "algorithm" in lines[19]
    assert "wire" in lines[19] and "raw" in lines[19] and "GB/s a rank" in lines[19]


def check_results(found: Any, num_ranks: int, num_experts: int) -> None:
    """The file of --json, to the last key."""
    sizes = {"num_tokens": 13, "hidden": 128, "num_topk": 2}
    target = "python" if os.environ.get("NUMBA_DISABLE_JIT") == "1" else "cpu"
    figures = {
        "dispatch": found.pop("dispatch"),
        "combine": found.pop("combine"),
    }
    num_sms = found["config"].pop("num_sms")
    assert num_sms > 0 and num_sms % 2 == 0
    assert found == {
        "ranks": num_ranks,
        "device": target,
        "transport": "shm",
        "config": {**sizes, "num_experts": num_experts},
        "checks": [{"name": name, "ok": True} for name in CHECKS],
    }
    assert {kind: [*of_kind] for kind, of_kind in figures.items()} == {
        "dispatch": ["fp8", "bf16"],
        "combine": ["bf16"],
    }
    for of_kind in figures.values():
        for figure in of_kind.values():
            assert set(figure) == FIGURES
            assert figure["time_us"] > 0 and figure["algorithm_gbps"] > 0
            assert isinstance(figure["chunk"], int) and figure["chunk"] > 0
            assert (figure["wire_gbps"] > 0) == (num_ranks > 1)
            assert (figure["raw_gbps"] > 0) == (num_ranks > 1)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_ranks_in_one_process(tmp_path: Path, num_ranks: int) -> None:
    """With one rank nothing is posted: wire and raw are 0."""
    file = tmp_path / "results.json"
    more = ["--ranks", str(num_ranks), "--skip-tuning", "--json", str(file)]
    check_passed(run_test(*small(12, *more)), num_ranks)
    check_results(json.loads(file.read_text()), num_ranks, 12)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_under_mpirun(tmp_path: Path, num_ranks: int) -> None:
    file = tmp_path / "results.json"
    more = ["--skip-tuning", "--json", str(file)]
    check_passed(mpirun_test(num_ranks, *small(12, *more)), num_ranks)
    check_results(json.loads(file.read_text()), num_ranks, 12)


@pytest.mark.parametrize("num_ranks", [8, 16])
def test_many_ranks_under_mpirun(num_ranks: int) -> None:
    check_passed(mpirun_test(num_ranks, *small(16, "--skip-tuning")), num_ranks)


def test_33_ranks_in_one_process(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    more = ["--ranks", "33", "--skip-tuning", "--json", str(file)]
    check_passed(run_test(*small(66, *more)), 33)
    check_results(json.loads(file.read_text()), 33, 66)


def test_tuning_reports_the_best(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    done = run_test(*small(12, "--ranks", "2", "--json", str(file)))
    check_passed(done, 2)
    found = json.loads(file.read_text())
    lines = [line.split() for line in done.stdout.splitlines()]
    best = [line for line in lines if line[0] == "best"]
    assert len(best) == 3
    for line, figure in zip(
        best, [*found["dispatch"].values(), *found["combine"].values()]
    ):
        assert int(line[1]) == figure["chunk"]
    chunks: dict[str, list[int]] = {}
    for line in lines:
        if line[0] in ("dispatch", "combine"):
            chunks.setdefault(" ".join(line[:2]), []).append(int(line[2]))
    assert [*chunks] == ["dispatch fp8", "dispatch bf16", "combine bf16"]
    for tried in chunks.values():
        assert len(tried) > 1 and tried == sorted(set(tried))
    check_results(found, 2, 12)


# What is refused.


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        ("--num-tokens many", 2, "--num-tokens: invalid int value"),
        ("--frobnicate", 2, "unrecognized arguments"),
        ("--device tpu", 2, "--device: invalid choice"),
        ("--ranks 0", 1, "num_ranks=0"),
        ("--ranks 2 --transport nonsense", 1, "transport: expected one of"),
        ("--ranks 2 --num-sms 3", 1, "num_sms: expected a positive even number"),
        ("--ranks 2 --timeout 0", 1, "timeout_s: expected a positive time"),
        ("--ranks 2 --num-tokens -1", 1, ""),
        ("--ranks 2 --hidden 0", 1, ""),
        ("--ranks 2 --hidden 100", 1, "hidden"),
        ("--ranks 2 --num-topk 13", 1, ""),
        ("--ranks 2 --num-experts 0", 1, "num_experts"),
        ("--ranks 2 --num-experts 13", 1, "num_experts"),
        ("--ranks 2 --seed -1", 1, ""),
    ],
)
def test_wrong_options(options: str, status: int, sentence: str) -> None:
    """One sentence, no traceback."""
    done = run_test(*small(12, "--skip-tuning", *options.split()))
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert sentence in done.stderr
    lines = done.stderr.splitlines()
    # argparse puts the usage first.
    assert lines[-1].startswith(("numba_ep.test: ", "python -m numba_ep.test: error: "))
    assert status == 2 or len(lines) == 1, done.stderr
    assert "passed" not in done.stdout


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "results.json"
    more = ["--ranks", "1", "--skip-tuning", "--json", str(file)]
    done = run_test(*small(12, *more))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(file) in done.stderr


def test_experts_that_the_ranks_cannot_share() -> None:
    done = mpirun_test(3, *small(13, "--skip-tuning"))
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr, done.stderr
    told = [ln for ln in done.stderr.splitlines() if ln.startswith("numba_ep.test: ")]
    assert len(told) == 3, done.stderr
    assert all("num_experts" in line and "13" in line for line in told)


def test_a_foreign_launcher() -> None:
    """Four singletons would each report a success of its own."""
    code = "import os, sys; from mpi4py import MPI; os.environ['PMI_SIZE'] = '4'\n"
    code += "from numba_ep.test import main; sys.exit(main(sys.argv[1:]))"
    for done in (
        run([sys.executable, "-c", code, *small(12)]),
        run_test(*small(12), PMI_SIZE="4"),
    ):
        assert done.returncode not in (0, None), done.stdout
        assert "Traceback" not in done.stderr, done.stderr
        assert "PMI_SIZE=4 tells of several processes" in done.stderr
        assert "passed" not in done.stdout


# A wrong result.


WRONG = """
import sys
import numpy as np
from numba_ep.buffer import Buffer
from numba_ep.test import main

original, spoilt = Buffer.dispatch, []

def dispatch(self, x, handle=None, *args, **kwargs):
    result = original(self, x, handle, *args, **kwargs)
    wanted = isinstance(x, tuple) == (WHAT == "fp8")
    if self.rank == 1 and handle is None and wanted and not spoilt:
        spoilt.append(self)
        rows = result[0] if WHAT == "bf16" else result[0][0]
        rows.view(f"u{rows.itemsize}")[3, 5] ^= 1
    return result

Buffer.dispatch = dispatch
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("what", "num_processes"), [("fp8", 3), ("bf16", 3), ("bf16", 1)]
)
def test_a_wrong_element(tmp_path: Path, what: str, num_processes: int) -> None:
    """Every rank fails; told are rank, check, token, column, and both values."""
    script = tmp_path / "wrong.py"
    script.write_text(textwrap.dedent(f"WHAT = {what!r}\n{WRONG}"))
    file = tmp_path / "results.json"
    options = small(12, "--skip-tuning", "--json", str(file))
    if num_processes == 1:
        options += ["--ranks", "3"]
        done = run([sys.executable, str(script), *options])
        assert done.returncode == 1, done.stdout + done.stderr
    else:
        shell = '"$@"; echo $? > "$0/$PMI_RANK.status"; exit 0'
        launch = [find_mpirun(), "-np", str(num_processes), "sh", "-c", shell]
        done = run([*launch, str(tmp_path), sys.executable, str(script), *options])
        files = [tmp_path / f"{rank}.status" for rank in range(num_processes)]
        statuses = [file.read_text().strip() for file in files]
        assert statuses == ["1"] * num_processes, done.stdout + done.stderr
    assert done.stderr == ""
    name = f"dispatch/{what}/topk"
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines if line.endswith("WRONG")] == [
        [name, "WRONG"]
    ]
    (told,) = [line for line in lines if "rank 1" in line]
    assert told.strip().startswith(f"rank 1: {name}: recv_x: token 3, column 5: got ")
    assert "expected" in told and "1 of " in told
    assert lines[-1].startswith("FAILED: 19 checks on 3 ranks in ")
    checks = json.loads(file.read_text())["checks"]
    assert [check["name"] for check in checks] == CHECKS
    assert [check["name"] for check in checks if not check["ok"]] == [name]
