"""What kernels are given: records of addresses (bytes) and counts, all int64.

Addresses rather than arrays: a launch passes them without looking inside, and one
compiled kernel serves every dtype. `R` ranks, `C` channels of the operation.
"""

from __future__ import annotations

from typing import NamedTuple

from transport.wr import LINE_BYTES as LINE_BYTES

LINE_WORDS = LINE_BYTES // 8


class Comm(NamedTuple):
    """One rank's end of a Buffer: fixed from construction to destroy."""

    rank: int
    num_ranks: int
    max_channels: int
    timeout_ns: int
    landing: int  # where puts come to lie: tails, row counters, rows, rings
    receive: int  # the same offsets where counters written alone are: heads
    own: int  # all these counters for traffic with oneself, in device memory
    tails_at: int  # offsets in the receive region, equal on all ranks
    heads_at: int
    row_counters_at: int
    rows_at: int
    send_rows: int  # send region: rows on their way out
    send_rows_at: int
    row_bytes: int
    control: int  # abort word and status record, shared with the host
    state: int  # device memory: see STATE_* below
    tail_cursors: int  # [R, max_channels] tokens ever published to each peer
    head_cursors: int  # [R, max_channels] tokens ever consumed from each peer
    fifo: int
    fifo_freed: int
    fifo_tickets: int  # one line a channel: entries ever reserved
    fifo_depth: int
    trace: int  # rings of records, one a warp (kernels/events.py); 0: nobody records
    trace_records: int  # a ring, a power of two


class Ring(NamedTuple):
    """Shape of this operation's rings: R x C of `capacity` slots at either end."""

    receive: int
    receive_at: int  # offset of the rings in the receive region
    send: int
    send_at: int
    own: int  # C rings for tokens that stay
    num_channels: int
    capacity: int
    chunk: int
    slot_bytes: int
    scratch: int
    scratch_words: int  # words of scratch a block


class Rows(NamedTuple):
    """Token rows in user memory, to read or to write; 0 where there is no such part."""

    x: int
    row_bytes: int
    scales: int  # float32; element (t, i) at t * token_stride + i * scale_stride
    num_scales: int
    token_stride: int
    scale_stride: int
    topk_idx: int  # int64 [tokens, num_topk]
    topk_weights: int  # float32 [tokens, num_topk]
    num_topk: int


class Plan(NamedTuple):
    """Who sends which rows, seen from the sender."""

    channel_prefix: int  # int32 [R, C]: rows for each peer up to and with the channel
    token_list: int  # int32 [R, T]: tokens by (peer, position); 0: rows lie in order
    rank_prefix: int  # int32 [R]: rows of peers up to and with each; without a list
    num_tokens: int


class Arrivals(NamedTuple):
    """Who receives which rows, seen from the receiver."""

    channel_prefix: int  # int32 [R, C]
    rank_prefix: int  # int32 [R]
    positions: int  # int32 [T, R]: position of a token's row on its ring, or -1
    num_tokens: int
    num_local_experts: int
    bias_0: int
    bias_1: int


class Header(NamedTuple):
    """The part of a row that must be equal on all ranks, `status` excepted."""

    status: int  # 0, or why this rank refuses (config.Refusal)
    kind: int
    hidden: int
    dtype: int
    num_topk: int
    has_weights: int
    num_experts: int
    expert_alignment: int
    chunk: int
    capacity: int
    num_channels: int
    handle_operation: int
    num_worst_tokens: int


class Notice(NamedTuple):
    """What `notify` counts and where it leaves what it learned."""

    is_token_in_rank: int  # bool [T, R]; 0: nothing to count (cached, combine)
    num_tokens: int
    tokens_per_rank: int  # int32 [R]
    tokens_per_expert: int  # int32 [E], or 0
    positions: int  # out, int32 [T, R]
    token_list: int  # out, int32 [R, T]
    channel_prefix: int  # out, int32 [R, C]
    recv_channel_prefix: int  # out, int32 [R, C]
    recv_rank_prefix: int  # out, int32 [R]
    results: int  # out, words shared with the host: see RESULT_*
    result_bytes: int
    scratch: int


class LayoutArrays(NamedTuple):
    """What `layout` reads and counts."""

    topk_idx: int  # int64 [T, K]
    num_tokens: int
    num_topk: int
    num_experts: int
    num_ranks: int
    tokens_per_rank: int  # out, int32 [R]
    tokens_per_expert: int  # out, int32 [E]
    is_token_in_rank: int  # out, bool [T, R]
    invalid: int  # scratch, one word


NUM_HEADER_WORDS = len(Header._fields)

# Words of Comm.control (the abort word has a line of its own).
ABORT = 0
RECORD = LINE_WORDS
RECORD_FIELDS = ("role", "peer", "channel", "head", "tail", "expected", "operation")

# Timeouts that a wait may last. Who waits for credit waits longer: the peer may hold it
# back because it waits for somebody else. Who waits for warps of its own rank waits
# longest. Those that they wait for give up first, and know which peer it is.
FOR_A_PEER = 1
FOR_CREDIT = 2
FOR_OWN_WARPS = 3

# Words of Comm.state, each on its own line.
STATE_OPERATION = 0
STATE_VERDICT = LINE_WORDS
STATE_CLAIM = 2 * LINE_WORDS
STATE_LOOKED = 3 * LINE_WORDS  # when a warp last looked at the abort word
STATE_WORDS = 4 * LINE_WORDS

# Words of an operation's result; RESULT_OPERATION is released last. The host may read
# them late: operation n has place n % RESULTS.
RESULTS = 8
RESULT_OPERATION = 0
RESULT_REFUSAL = 1
RESULT_CULPRIT = 2
RESULT_FIELD = 3
RESULT_EXPECTED = 4
RESULT_GOT = 5
RESULT_RECEIVED = 6
RESULT_EXPERTS = 8

# Words of Notice.scratch.
SCRATCH_MET = 0  # warps that have all their rows
SCRATCH_STATUS = 1  # what counting found wrong
SCRATCH_COUNTS = LINE_WORDS  # [R, C] rows for each peer on each channel

# Words of a row: the header, tokens for each rank, then for this peer alone the rows on
# each channel and for each of its experts.
ROW_TOKENS = NUM_HEADER_WORDS

# Who waited, in a status record.
SENDER, SEND_COORDINATOR, RECEIVER, RECEIVE_COORDINATOR, NOTIFY, FIFO = range(1, 7)
ROLES = ("", "sender", "sender coordinator", "receiver", "receiver coordinator",
         "notify", "FIFO")  # fmt: skip
