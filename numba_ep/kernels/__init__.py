"""The kernels, one source for every target. In the order of a token's journey:

    cast      bfloat16 -> e4m3 with scales (optional)
    layout    top-k ids -> counts a rank and an expert
    notify    the exchange of rows: who sends how much to whom
    dispatch  user rows -> send rings -> receive rings -> user rows
    combine   the same way back, and the sum

    channel   verbs that the roles share     sender, receiver   the roles' common parts
    records   what kernels are given         tracing, events    who did what, and when
"""

from __future__ import annotations

from typing import Any


def all_kernels() -> list[tuple[Any, tuple[Any, ...]]]:
    """Every kernel with arguments of the types that it is always launched with."""
    from numba_ep.kernels.cast import cast_kernel
    from numba_ep.kernels.combine import combine_kernel
    from numba_ep.kernels.dispatch import dispatch_kernel
    from numba_ep.kernels.layout import layout_kernel
    from numba_ep.kernels.notify import notify_kernel
    from numba_ep.kernels.records import (
        Arrivals,
        Comm,
        Header,
        LayoutArrays,
        Notice,
        Plan,
        Ring,
        Rows,
    )
    from numba_ep.kernels.tracing import clock_kernel

    def zeros(*records: Any) -> tuple[Any, ...]:
        return tuple(record(*[0] * len(record._fields)) for record in records)

    moves = zeros(Comm, Ring, Plan, Arrivals, Rows, Rows)
    return [
        (clock_kernel, (0,)),
        (cast_kernel, (0, 0, 0, 0)),
        (layout_kernel, zeros(LayoutArrays)),
        (notify_kernel, zeros(Comm, Header, Notice)),
        (dispatch_kernel, moves),
        (combine_kernel, moves),
    ]
