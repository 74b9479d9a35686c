"""What a Buffer raises, and the sentences in it."""

from __future__ import annotations

from typing import Any

from numba_ep.config import Kind, Refusal
from numba_ep.kernels.records import (
    FOR_A_PEER,
    FOR_CREDIT,
    FOR_OWN_WARPS,
    RECEIVE_COORDINATOR,
    ROLES,
    SEND_COORDINATOR,
    SENDER,
    Header,
)
from transport import wr


class BufferAborted(RuntimeError):
    """The Buffer is dead: every later call raises this, only destroy is allowed.

    culprit: the rank that is waited for, dead or failed; -1 where nobody is known.
    """

    def __init__(self, message: str, culprit: int) -> None:
        super().__init__(message)
        self.culprit = culprit


class PeerTimeout(BufferAborted, TimeoutError):
    """A rank did not come in time, or has ended."""


class RefusedError(ValueError):
    """Another rank refused the operation, or the ranks disagree. The Buffer lives on.

    culprit: the rank in question.
    """

    def __init__(self, message: str, culprit: int) -> None:
        super().__init__(message)
        self.culprit = culprit


_REASONS = {
    Refusal.INVALID_ARGUMENT: "it was given an invalid argument (see its own error)",
    Refusal.BUFFER_TOO_SMALL: "its buffer is too small (see its own error)",
    Refusal.INVALID_EXPERT_ID: (
        "its num_tokens_per_rank is negative: get_dispatch_layout met an expert id "
        "outside [-1, num_experts)"
    ),
    Refusal.LAYOUT_MISMATCH: (
        "its num_tokens_per_rank is not the column sums of its is_token_in_rank; take "
        "both from one call of get_dispatch_layout"
    ),
}


def refused(
    operation: int, refusal: int, culprit: int, field: int, expected: int, got: int
) -> RefusedError:
    """The error for a refused operation, from the words that the verdict left."""
    if refusal == Refusal.RANKS_DISAGREE:
        name = Header._fields[field]
        if name == "kind":
            values = f"{_kind(expected)} on rank 0, {_kind(got)} on rank {culprit}"
        else:
            values = f"{expected} on rank 0, {got} on rank {culprit}"
        text = f"the ranks disagree on {name}: {values}"
    elif refusal == Refusal.TOO_MANY_TOKENS:
        text = (
            f"num_worst_tokens: expected at least {got}, which rank {culprit} "
            f"receives, got {expected}"
        )
    else:
        text = f"rank {culprit} refused: {_REASONS[Refusal(refusal)]}"
    return RefusedError(f"operation {operation}: {text}; no token was moved", culprit)


def _kind(value: int) -> str:
    try:
        return Kind(value).name.lower().replace("_", " ")
    except ValueError:
        return f"operation kind {value}"


def _timeouts(role: int, is_own: bool) -> int:
    """How many a wait lasts before it is reported."""
    if is_own or role in (SEND_COORDINATOR, RECEIVE_COORDINATOR):
        return FOR_OWN_WARPS
    return FOR_CREDIT if role == SENDER else FOR_A_PEER


def aborted(
    rank: int, value: int, record: Any, timeout_s: float, error: BaseException | None
) -> BufferAborted:
    """The error for abort word `value` and the status record of this rank's kernels."""
    cause, culprit = wr.abort_parts(value)
    who = f"rank {rank}: rank {culprit}" if culprit >= 0 else f"rank {rank}: a rank"
    role, peer, channel, head, tail, expected, operation = (int(n) for n in record)
    waited = ""
    if role:
        waited_s = timeout_s * _timeouts(role, peer == rank)
        waited = (
            f" (operation {operation}: the {ROLES[role]} of channel {channel} waited "
            f"{waited_s:g} s for rank {peer}: head {head}, tail {tail}, expected "
            f"{expected})"
        )
    if cause == wr.ABORT_TIMEOUT:
        text = f"{who} did not answer within {timeout_s:g} s{waited}"
        return PeerTimeout(f"{text}; is it still alive?", culprit)
    if cause == wr.ABORT_DEAD:
        return PeerTimeout(f"{who} has ended{waited}", culprit)
    if cause == wr.ABORT_LEFT:
        return PeerTimeout(f"{who} has left without destroy{waited}", culprit)
    if cause == wr.ABORT_CANCELLED:
        return BufferAborted(f"{who} was interrupted{waited}", culprit)
    what = f": {error}" if error else ""
    return BufferAborted(f"{who}: its transport failed{what}{waited}", culprit)
