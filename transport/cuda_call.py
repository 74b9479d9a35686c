"""Calls of CUDA's driver from compiled loops: a third of their price from Python, and
no interpreter lock."""

from __future__ import annotations

import ctypes

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I64 = ir.IntType(64)


def entry_point(name: str) -> int:
    """Address of a function of the driver, by its name with its version."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@intrinsic
def call_driver(typingctx, function, a, b, c, d):
    """`function(a, b, c, d)`, an address and four integers: the CUresult."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [_I64] * 4)
        pointer = builder.inttoptr(args[0], kind.as_pointer())
        return builder.zext(builder.call(pointer, list(args[1:])), _I64)

    return types.int64(*[types.int64] * 5), codegen
