"""What the kernels become on a GPU, seen without one: PTX, registers, spills.

    python tests/ptx.py             a table of all kernels and compute capabilities
    python tests/ptx.py --cc 9.0    one of them
    python tests/ptx.py --show every_name --cc 9.0      its PTX

A process has one device and one set of compiled helpers, so each compute capability is
compiled in a process of its own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


def find_ptxas() -> str | None:
    """The ptxas of the nvidia-cuda-nvcc package, else the one on the PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "ptxas":
            return str(file.locate())
    return shutil.which("ptxas")


def missing_tool() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    try:
        importlib.metadata.version("numba-cuda")
        importlib.metadata.version("nvidia-cuda-nvcc")
    except importlib.metadata.PackageNotFoundError as error:
        return f"the package {error.name} is missing: pip install numba-cuda[cu13]"
    return None if find_ptxas() else "ptxas is missing: pip install nvidia-cuda-nvcc"


def pretend(capability: str) -> Any:
    """Select the cuda target and make numba-cuda believe in a GPU of `capability`."""
    from numba_ep import device

    device._chosen = importlib.import_module("numba_ep.device.cuda")
    dispatcher: Any = importlib.import_module("numba.cuda.dispatcher")
    gpu = SimpleNamespace(compute_capability=_pair(capability))
    dispatcher.get_current_device = lambda: gpu
    return device._chosen


def _pair(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


def every_name_kernel() -> Any:
    """A kernel that uses each name of `numba_ep.device` (it is never run)."""
    import numpy as np

    from numba_ep import device as d

    @d.cuda.jit
    def every_name(words: int, rows: int, out: int, num_bytes: int) -> None:
        lane = d.lane_id()
        warp = d.warp_id() + d.num_warps() * (d.block_id() + d.num_blocks())
        start = d.clock_ns()
        d.block_sync()
        spins = 0
        while d.ld_relaxed(words, 0) < warp:
            d.relax(spins)
            spins += 1
        d.fence()
        d.warp_sync()
        seen = d.ld_acquire(words, 1)
        d.st_release(words, 2, seen)
        d.st_release_host(words, 2, seen)
        seen = d.ld_acquire_block(words, 3)
        d.st_release_block(words, 4, seen)
        d.add_release_block(words, 5, seen)
        d.atomic_add(words, 6, seen)
        d.compare_and_swap(words, 7, seen, warp)
        d.copy_row(out, rows, num_bytes)
        d.store_i64(out, lane, d.load_i64(rows, lane))
        d.store_i32(out, lane, d.load_i32(rows, lane))
        d.store_u8(out, lane, d.load_u8(rows, lane))
        d.store_f32(out, lane, d.load_f32(rows, lane))
        d.add_i32(out, lane, seen)
        size = d.warp_max(d.load_bf16_magnitude(rows, lane))
        number = d.load_bf16(rows, lane) + d.magnitude_to_f32(size)
        d.store_e4m3(out, lane, number)
        sums = d.add_bf16x8(d.splat_f32x8(number), rows, lane)
        d.store_bf16x8(
            out, lane, d.add_bf16x8(sums, rows, lane + np.int64(d.WARP_SIZE))
        )
        count = d.warp_count_below(number > 0) + d.warp_max(seen)
        count += d.warp_sum(count) + d.warp_broadcast(count)
        if d.warp_any(count == seen):
            d.store_i64(out, 1, d.clock_ns() - start)
        d.store_i64(out, 2, count)

    return every_name


def all_kernels() -> list[tuple[Any, tuple[Any, ...]]]:
    """(kernel, argument types) of the project's kernels, and of `every_name`."""
    listed = importlib.import_module("numba_ep.kernels").all_kernels()
    argument_type = importlib.import_module(
        "numba_ep.device.cuda_runtime"
    ).argument_type
    listed = [*listed, (every_name_kernel(), (0, 0, 0, 0))]
    return [(kernel, tuple(map(argument_type, args))) for kernel, args in listed]


def assemble(ptx: str, capability: str) -> dict[str, int]:
    """Registers a thread, spilled and stack bytes, as ptxas reports them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        arch = "sm_" + capability.replace(".", "")
        command = [find_ptxas() or "ptxas", "-v", f"-arch={arch}", str(source)]
        command += ["-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    report = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"ptxas -arch={arch}: {report}")

    def numbers(pattern: str) -> list[int]:
        return [int(n) for n in re.findall(pattern, report)]

    return {
        "registers": max(numbers(r"Used (\d+) registers")),
        "spill_bytes": sum(numbers(r"(\d+) bytes spill")),
        "stack_bytes": sum(numbers(r"(\d+) bytes stack frame")),
    }


def compile_all(capability: str) -> dict[str, dict[str, Any]]:
    """By kernel name: its `ptx`, `registers`, `spill_bytes`, `stack_bytes`."""
    pretend(capability)
    cuda = importlib.import_module("numba.cuda")
    results = {}
    for kernel, signature in all_kernels():
        function = kernel.py_func
        bounds = kernel.targetoptions["launch_bounds"]
        ptx, _ = cuda.compile_ptx(
            function, signature, cc=_pair(capability), launch_bounds=bounds
        )
        results[function.__name__] = {"ptx": ptx, **assemble(ptx, capability)}
    return results


def compile_apart(capability: str) -> dict[str, dict[str, Any]]:
    """`compile_all` in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, "--json", "--cc", capability],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise RuntimeError(f"compute capability {capability}: {done.stderr[-4000:]}")
    return json.loads(done.stdout)


def compile_everywhere(
    capabilities: tuple[str, ...] = CAPABILITIES,
) -> dict[str, dict[str, dict[str, Any]]]:
    """`compile_all` by compute capability, a few at a time."""
    workers = min(len(capabilities), os.cpu_count() or 1, 4)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(compile_apart, capabilities))
    return dict(zip(capabilities, results, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="PTX, registers and spills of kernels")
    parser.add_argument("--cc", help="one compute capability instead of all")
    parser.add_argument("--json", action="store_true", help="everything, for a program")
    parser.add_argument("--show", metavar="KERNEL", help="print its PTX")
    chosen = parser.parse_args()
    if reason := missing_tool():
        print(reason, file=sys.stderr)
        return 1
    if chosen.json:
        json.dump(compile_all(chosen.cc or "9.0"), sys.stdout)
        return 0
    capabilities = (chosen.cc,) if chosen.cc else CAPABILITIES
    results = compile_everywhere(capabilities)
    if chosen.show:
        for kernels in results.values():
            print(kernels[chosen.show]["ptx"])
        return 0
    print(f"{'registers/spilled bytes':24}" + "".join(f"{c:>9}" for c in capabilities))
    for name in results[capabilities[0]]:
        cells = [results[c][name] for c in capabilities]
        row = [f"{c['registers']}/{c['spill_bytes']}" for c in cells]
        print(f"{name:24}" + "".join(f"{cell:>9}" for cell in row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
