"""What a GPU would run, checked without one: no spills, the promised orders."""

from __future__ import annotations

import inspect
import re
from typing import Any

import ptx
import pytest
from conftest import require

# What each name must become, and how often `every_name` has it at least.
EVERYWHERE = {
    "ld_relaxed": r"ld\.relaxed\.sys\.b64",
    "ld_acquire": r"ld\.acquire\.sys\.b64",
    "st_release": r"st\.release\.sys\.b64",
    "fence": r"fence\.acq_rel\.sys;",
    "ld_acquire_block": r"ld\.acquire\.cta\.b64",
    "st_release_block": r"st\.release\.cta\.b64",
    "add_release_block": r"atom\.acq_rel\.cta\.add\.u64",
    "atomic_add": r"atom\.acq_rel\.gpu\.add\.u64",
    "compare_and_swap": r"atom\.acq_rel\.sys\.cas\.b64",
    "add_i32": r"atom\.(global\.)?add\.[us]32",
    "warp_sync": r"bar\.warp\.sync 0xffffffff;",
    "block_sync": r"barrier\.sync 0;",
    "warp_sum": r"shfl\.sync\.bfly\.b32",
    "warp_max of int32": r"redux\.sync\.max\.s32",
    "warp_broadcast": r"shfl\.sync\.idx\.b32",
    "warp_any": r"vote\.sync\.ballot\.b32",
    "warp_count_below": r"%lanemask_lt",
    "clock_ns": r"%globaltimer",
    "relax": r"nanosleep\.u32",
    "copy_row": r"ld\.global\.v2\.b64",
    "add_bf16x8": r"ld\.global\.v4\.[bu]32",
    "store_bf16x8": r"cvt\.rn\.bf16x2\.f32",
}
E4M3 = r"cvt\.rn\.satfinite\.e4m3x2\.f32"


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, dict[str, Any]]]:
    """By compute capability and kernel: PTX and what ptxas says of it."""
    reason = ptx.missing_tool()
    require(reason is None, reason or "")
    return ptx.compile_everywhere()


@pytest.mark.parametrize("capability", ptx.CAPABILITIES)
def test_no_kernel_spills(compiled: Any, capability: str) -> None:
    spilled = {k: r["spill_bytes"] for k, r in compiled[capability].items()}
    assert spilled == dict.fromkeys(spilled, 0)
    assert "cast_kernel" in spilled


@pytest.mark.parametrize("capability", ptx.CAPABILITIES)
def test_rows_are_never_read_through_the_read_only_cache(
    compiled: Any, capability: str
) -> None:
    for name, kernel in compiled[capability].items():
        assert not re.search(r"\bld\.global(\.\w+)*\.nc\b", kernel["ptx"]), name


@pytest.mark.parametrize("capability", ptx.CAPABILITIES)
def test_all_of_a_kernel_is_one_function(compiled: Any, capability: str) -> None:
    # A helper that is called instead of inlined gets its records through local memory.
    for name, kernel in compiled[capability].items():
        assert not re.search(r"\bcall(\.uni)?\b", kernel["ptx"]), name


@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_a_name_becomes(compiled: Any, name: str) -> None:
    for capability, kernels in compiled.items():
        assert re.search(EVERYWHERE[name], kernels["every_name"]["ptx"]), capability


@pytest.mark.parametrize("capability", ptx.CAPABILITIES)
def test_every_access_to_a_word_has_order_and_scope(
    compiled: Any, capability: str
) -> None:
    text = compiled[capability]["every_name"]["ptx"]
    assert not re.search(r"\b(ld|st)\.volatile\b", text)
    # One of each is written in the kernel; the compiler has merged and dropped none.
    # (The first turn of the waiting loop may stand apart from the others.)
    for name in ("ld_acquire", "st_release_block", "compare_and_swap"):
        assert len(re.findall(EVERYWHERE[name], text)) == 1, name
    # st_release, and st_release_host, which is the same on a GPU.
    assert len(re.findall(EVERYWHERE["st_release"], text)) == 2
    assert len(re.findall(EVERYWHERE["clock_ns"], text)) == 2


@pytest.mark.parametrize("capability", ptx.CAPABILITIES)
def test_e4m3_instruction_where_there_is_one(compiled: Any, capability: str) -> None:
    kernels = compiled[capability]
    has_it = capability not in ("8.0", "8.6")
    for name in ("every_name", "cast_kernel"):
        assert bool(re.search(E4M3, kernels[name]["ptx"])) == has_it, name


@pytest.mark.parametrize("capability", ptx.CAPABILITIES)
def test_scales_stay_float32(compiled: Any, capability: str) -> None:
    # 448 / amax in float64 would round differently and change bytes.
    assert ".f64" not in compiled[capability]["cast_kernel"]["ptx"]


def test_every_documented_name_is_used_here() -> None:
    from numba_ep import device
    from numba_ep.device import cpu

    names = re.findall(r"\w+", (device.__doc__ or "").partition("Who and where")[2])
    documented = {name for name in names if hasattr(cpu, name)}
    used = re.findall(r"\bd\.(\w+)", inspect.getsource(ptx.every_name_kernel))
    # A constant of the loops around `relax`, which are not the device layer's.
    assert documented - set(used) == {"SPINS_PER_CHECK"}
