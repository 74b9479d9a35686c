"""Every wait is bounded: it ends by the abort word or the clock, and names the peer.

After a timeout all warps leave in good order and the host raises. There is no trap: the
CUDA context stays usable.
"""

from __future__ import annotations

from numba_ep.device import (
    SPINS_PER_CHECK,
    clock_ns,
    compare_and_swap,
    cuda,
    lane_id,
    ld_relaxed,
    num_warps,
    relax,
    st_release,
    store_i64,
    warp_broadcast,
    warp_id,
    warp_sync,
)
from numba_ep.kernels.records import (
    ABORT,
    FOR_A_PEER,
    FOR_OWN_WARPS,
    RECORD,
    STATE_CLAIM,
    STATE_LOOKED,
    STATE_OPERATION,
)
from numba_ep.kernels.tracing import now, record
from transport.wr import (
    ABORT_CAUSE,
    ABORT_TIMEOUT,
)

# What `wait_verdict` says.
GO_ON = 0
ABORTED = 1
TIMED_OUT = 2


# On a GPU the abort word lies in the host's memory, and loads of one word there wait
# for each other, 2 us each: if every warp asked, all that goes to the host would stand
# behind them. So one asks for all, and who comes sooner than this looks at the clock
# alone.
LOOK_NS = 20_000


@cuda.jit(device=True)
def look(comm, since, patience):
    """What one lane finds: the abort word first, then the clock."""
    time = clock_ns()
    if time - ld_relaxed(comm.state, STATE_LOOKED) > LOOK_NS:
        # A plain store: who sees it late asks once more.
        store_i64(comm.state, STATE_LOOKED, time)
        if ld_relaxed(comm.control, ABORT) != 0:
            store_i64(comm.state, STATE_LOOKED, 0)  # the others shall see it at once
            return ABORTED
    if time - since > patience * comm.timeout_ns:
        return TIMED_OUT
    return GO_ON


@cuda.jit(device=True)
def wait_verdict(comm, spins, since, patience):
    """Relax; now and then see whether to give up. The same answer on every lane.

    patience: how many timeouts, see above.
    """
    relax(spins)
    if spins % SPINS_PER_CHECK != SPINS_PER_CHECK - 1:
        return GO_ON
    return warp_broadcast(look(comm, since, patience))


@cuda.jit(device=True)
def report_timeout(comm, role, peer, channel, head, tail, expected):
    """Leave a status record and end the Buffer on this rank; the first record stays."""
    if lane_id() == 0 and compare_and_swap(comm.state, STATE_CLAIM, 0, 1) == 0:
        store_i64(comm.control, RECORD, role)
        store_i64(comm.control, RECORD + 1, peer)
        store_i64(comm.control, RECORD + 2, channel)
        store_i64(comm.control, RECORD + 3, head)
        store_i64(comm.control, RECORD + 4, tail)
        store_i64(comm.control, RECORD + 5, expected)
        store_i64(comm.control, RECORD + 6, ld_relaxed(comm.state, STATE_OPERATION))
        if ld_relaxed(comm.control, ABORT) == 0:
            # Release: the host reads the record after it sees this word.
            abort = ABORT_TIMEOUT * ABORT_CAUSE + peer + 1
            st_release(comm.control, ABORT, abort)
    warp_sync()


def by_warp(alone, coordinate, work_along):
    """Build a block: its only warp plays `alone`; else its last warp coordinates and
    the others work along. True for the one warp that has brought the block's part of
    the operation to its end."""

    @cuda.jit(device=True)
    def block(comm, ring, work, rows, channel):
        if num_warps() == 1:
            return alone(comm, ring, work, rows, channel)
        if warp_id() == num_warps() - 1:
            return coordinate(comm, ring, work, rows, channel)
        work_along(comm, ring, work, rows, channel)
        return False

    return block


def over_peers(advance, report, waits_as, patience=FOR_A_PEER):
    """Build a role that serves all peers and never waits for one while another can go.

    advance(comm, ring, work, rows, channel, peer) -> (steps done, whether any is left).
    report(comm, ring, work, channel, peer) leaves the status record of a wait for
    `peer` that lasted too long. waits_as: the kind of its waits in a trace, where the
    peer is the one that ended the wait. The role returns False where the Buffer aborts.
    """

    @cuda.jit(device=True)
    def role(comm, ring, work, rows, channel):
        spins = 0
        since = clock_ns()
        while True:
            steps = 0
            waits_for = -1
            goes_on = -1
            looked = now(comm)  # where this round goes on, the wait ends here
            # Every rank begins with another peer, or all would send to rank 0 at once;
            # the own rank comes last, for its rows need no link.
            for i in range(comm.num_ranks):
                peer = (comm.rank + 1 + i) % comm.num_ranks
                done, left = advance(comm, ring, work, rows, channel, peer)
                if done > 0 and steps == 0:
                    goes_on = peer
                steps += done
                if left and (waits_for < 0 or peer != comm.rank):
                    waits_for = peer
            if spins > 0 and steps > 0:
                record(comm, waits_as, channel, goes_on, since, looked, 0, 0)
            if waits_for < 0:
                return True
            if steps > 0:
                spins = 0
                since = clock_ns()
                continue
            limit = FOR_OWN_WARPS if waits_for == comm.rank else patience
            verdict = wait_verdict(comm, spins, since, limit)
            spins += 1
            if verdict == TIMED_OUT:
                report(comm, ring, work, channel, waits_for)
            if verdict != GO_ON:
                return False

    return role
