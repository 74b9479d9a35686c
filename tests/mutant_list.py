"""Ways to break the code, each of which some test must notice.

A mutant replaces `old`, which its file has exactly once, by `new`. `killers` are tried
in order until one fails; "torture" stands for some episodes of tests/torture.py, other
words for pytest's arguments. All run without a compiler (`NUMBA_DISABLE_JIT=1`), which
takes seconds, but for killers that begin with "compiled": what only machine code shows.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault. name: what it does wrong."""

    name: str
    path: str
    old: str
    new: str
    killers: tuple[str, ...] = ("torture",)


KERNELS = "numba_ep/kernels/"

CHANNEL = [
    Mutant(
        "a credit more than the ring has slots",
        KERNELS + "channel.py",
        "consumed + ring.capacity if",
        "consumed + ring.capacity + 1 if",
    ),
    Mutant(
        "credit while heads of the operation before are on their way",
        KERNELS + "channel.py",
        "if consumed >= 0 else 0",
        "if consumed > -(1 << 60) else 0",
        ("tests/test_invariants.py -k test_2", "torture"),
    ),
    Mutant(
        "the tail is published one row early",
        KERNELS + "channel.py",
        "dst_rank, channel) + first + count",
        "dst_rank, channel) + first + count + 1",
    ),
    Mutant(
        "the head is returned one row early",
        KERNELS + "channel.py",
        "comm.head_cursors, src_rank, channel) + consumed",
        "comm.head_cursors, src_rank, channel) + consumed + 1",
    ),
    Mutant(
        "rows are sent into the ring of another source",
        KERNELS + "channel.py",
        "ring.receive_at + slot_at(ring, comm.rank, channel, first)",
        "ring.receive_at + slot_at(ring, dst_rank, channel, first)",
    ),
    Mutant(
        "the slot comes from a position that is off by one",
        KERNELS + "channel.py",
        "return ring.send + slot_at(ring, dst_rank, channel, position)",
        "return ring.send + slot_at(ring, dst_rank, channel, position + 1)",
    ),
    Mutant(
        "the tail of another channel is polled",
        KERNELS + "channel.py",
        "word = tail_word(comm, src_rank, channel)",
        "word = tail_word(comm, src_rank, 0)",
    ),
]

FIFO = [
    Mutant(
        "a full FIFO is overwritten",
        KERNELS + "fifo.py",
        ">= comm.fifo_depth:",
        ">= 2 * comm.fifo_depth:",
        ("tests/test_fifo_proxy.py -k full_fifo",),
    ),
    Mutant(
        "an entry is committed before it is whole",
        KERNELS + "fifo.py",
        "        store_i64(entry, OPCODE, PUT)\n",
        "        st_release_host(entry, COMMIT, sequence + 1)\n"
        "        store_i64(entry, OPCODE, PUT)\n",
        ("tests/test_invariants.py -k in_python",),
    ),
    Mutant(
        "all requests go to queue 0",
        KERNELS + "fifo.py",
        "        store_i64(entry, NUM_BYTES, num_bytes)\n",
        "        store_i64(entry, NUM_BYTES, num_bytes)\n"
        "        store_i64(entry, QUEUE, 0)\n",
        ("tests/test_invariants.py -k test_1",),
    ),
    Mutant(
        "an entry is freed without being copied out first",
        "transport/fifo.py",
        "            for field in range(wr.NUM_FIELDS):\n",
        "            store_release(freed + fifo * LINE_BYTES, 0, sequence + 1)\n"
        "            for field in range(wr.NUM_FIELDS - 1):\n",
        ("tests/test_fifo_proxy.py -k arrives_whole",),
    ),
]

SENDER = [
    Mutant(
        "a sender blocks on the first peer that gives no credit",
        KERNELS + "waiting.py",
        "                    waits_for = peer\n",
        "                    waits_for = peer\n                    break\n",
        ("tests/test_invariants.py -k test_7", "torture"),
    ),
    Mutant(
        "a sender packs one row beyond its credit",
        KERNELS + "sender.py",
        "stop = min(count, credit, chunk_end)",
        "stop = min(count, credit + 1, chunk_end)",
    ),
    Mutant(
        "a chunk is published before all its rows are packed",
        KERNELS + "sender.py",
        "ld_acquire_block(scratch, packed)) != expected:",
        "ld_acquire_block(scratch, packed)) == 0:",
    ),
    Mutant(
        "the packed count of a chunk is not taken back",
        KERNELS + "sender.py",
        "        store_i64(scratch, packed, 0)\n",
        "",
    ),
    Mutant(
        "cursors stay where they are",
        KERNELS + "sender.py",
        "        moved += rows_on(prefix, peer, channel, ring.num_channels)\n",
        "",
    ),
    Mutant(
        "combine sends the rows of another source",
        KERNELS + "sender.py",
        "load_i32(plan.rank_prefix, dst_rank - 1)",
        "load_i32(plan.rank_prefix, dst_rank - 1) * 0",
    ),
    Mutant(
        "an expert id is cut to 32 bits",
        KERNELS + "sender.py",
        "expert if fits else -1",
        "expert",
        ("tests/test_cases_b.py -k c22",),
    ),
    Mutant(
        "scales are read as if they were row-major",
        KERNELS + "row_copy.py",
        "return load_f32(place.scales, i * place.stride)",
        "return load_f32(place.scales, i)",
        ("tests/test_cases_b.py tests/test_cases_c.py -k c26",),
    ),
]

RECEIVER = [
    Mutant(
        "the credit of the last rows is forgotten",
        KERNELS + "receiver.py",
        "        return steps, True\n    if lane_id() == 0:\n        return_credit",
        "        return steps, True\n    if lane_id() == 0 and consumed < count:\n"
        "        return_credit",
    ),
    Mutant(
        "only the first warp's progress counts",
        KERNELS + "receiver.py",
        "for warp in range(num_workers()):",
        "for warp in range(1):",
    ),
    Mutant(
        "a row counts as read before it was",
        KERNELS + "receiver.py",
        "    st_release_block(block_scratch(ring), index, position)\n",
        "    st_release_block(block_scratch(ring), index, position + ring.chunk)\n",
    ),
    Mutant(
        "the receiver takes rows up to the tail",
        KERNELS + "dispatch.py",
        "stop = min(seen, count, position + ring.chunk)",
        "stop = min(seen, position + ring.chunk)",
        ("tests/test_invariants.py -k test_4",),
    ),
    Mutant(
        "two rows are swapped",
        KERNELS + "dispatch.py",
        "rows, first + position)",
        "rows, first + (1 - position if position < 2 <= count else position))",
    ),
    Mutant(
        "experts of other ranks keep their weight",
        KERNELS + "dispatch.py",
        "if is_local and rows.topk_weights != 0:",
        "if rows.topk_weights != 0:",
    ),
    Mutant(
        "a refused operation moves tokens all the same",
        KERNELS + "dispatch.py",
        "    if load_i64(comm.state, STATE_VERDICT) != 0:\n        return\n",
        "",
        ("tests/test_invariants.py -k test_5",),
    ),
]

NOTIFY = [
    Mutant(
        "all rows use one area",
        KERNELS + "rows.py",
        "(operation % 2 * comm.num_ranks + peer)",
        "(0 * comm.num_ranks + peer)",
        ("tests/test_invariants.py -k test_3_a_row", "torture"),
    ),
    Mutant(
        "the row of the operation before will do",
        KERNELS + "rows.py",
        "if arrived >= operation:",
        "if arrived >= operation - 1:",
    ),
    Mutant(
        "a refusal does not count as an operation",
        KERNELS + "notify.py",
        "        store_i64(comm.state, STATE_OPERATION, operation)\n",
        "        store_i64(comm.state, STATE_OPERATION, "
        "operation - (header.status != 0))\n",
    ),
    Mutant(
        "the verdict compares with the own row",
        KERNELS + "verdict.py",
        "expected = load_i64(row_from(comm, operation, 0), field)\n            if",
        "expected = load_i64(row_from(comm, operation, comm.rank), field)\n"
        "            if",
        ("tests/test_cases_c.py tests/test_cases_d.py -k c43", "torture"),
    ),
    Mutant(
        "the config's chunk is not compared",
        KERNELS + "rows.py",
        "    store_i64(row, 8, header.chunk)\n",
        "    store_i64(row, 8, 0)\n",
    ),
    Mutant(
        "the handle's operation is not compared",
        KERNELS + "rows.py",
        "    store_i64(row, 11, header.handle_operation)\n",
        "    store_i64(row, 11, 0)\n",
        ("tests/test_cases_b.py -k c32",),
    ),
    Mutant(
        "sources' rows overlap in the output",
        KERNELS + "notify.py",
        "            received += load_i32(notice.recv_rank_prefix, src_rank)\n",
        "            received = load_i32(notice.recv_rank_prefix, src_rank)\n",
    ),
    Mutant(
        "counts per expert are not aligned",
        KERNELS + "notify.py",
        "(total + alignment - 1) // alignment * alignment",
        "total",
    ),
    Mutant(
        "counts are announced before they are written",
        KERNELS + "notify.py",
        "    verdict = NOT_JUDGED\n    if wait",
        "    verdict = NOT_JUDGED\n"
        "    st_release(result_of(notice, operation), RESULT_OPERATION, operation)\n"
        "    if wait",
        ("tests/test_invariants.py -k in_python_5",),
    ),
    Mutant(
        "a token counts once for each of its experts",
        KERNELS + "layout.py",
        "if load_u8(arrays.is_token_in_rank, at) == 0:",
        "if load_u8(arrays.is_token_in_rank, at) >= 0:",
    ),
]

COMBINE = [
    Mutant(
        "the second bias is skipped",
        KERNELS + "combine.py",
        "    if arrivals.bias_1 != 0:\n        store",
        "    if arrivals.bias_1 < 0:\n        store",
    ),
    Mutant(
        "rows are added by descending rank",
        KERNELS + "combine.py",
        "            for i in range(1, count):\n",
        "            for i in range(count - 1, 0, -1):\n",
    ),
    Mutant(
        "a bias of -0 becomes +0",
        KERNELS + "combine.py",
        "return np.float32(-0.0) if arrivals.bias_0 != 0 else np.float32(0.0)",
        "return np.float32(0.0) if arrivals.bias_0 != 0 else np.float32(0.0)",
        ("tests/test_cases_a.py -k c16",),
    ),
    Mutant(
        "the biases are added last",
        KERNELS + "combine.py",
        "            term = load_i64(terms, 0)\n"
        "            totals = add_x7(splat_x7(start), term, group)\n"
        "            others = add_x7(splat_x7(start), term, group + SEVEN)\n"
        "            for i in range(1, count):\n"
        "                term = load_i64(terms, i)\n",
        "            totals = splat_x7(start)\n"
        "            others = splat_x7(start)\n"
        "            for i in range(count):\n"
        "                term = load_i64(terms, (i + num_biases(arrivals)) % count)\n",
    ),
    Mutant(
        "a receiver does not look ahead for what it needs next",
        KERNELS + "combine.py",
        "        if load_i32(arrivals.positions, at) >= 0:\n            set_next",
        "        if load_i32(arrivals.positions, at) >= 0 and token + 9 < stop:\n"
        "            set_next",
    ),
    Mutant(
        "weights are those of the last rank",
        KERNELS + "combine.py",
        "            total += load_f32(load_i64(terms, i) + rows.row_bytes, k)\n",
        "            total = load_f32(load_i64(terms, i) + rows.row_bytes, k)\n",
    ),
]

WAITING = [
    Mutant(
        "nobody looks at the abort word",
        KERNELS + "waiting.py",
        "        if ld_relaxed(comm.control, ABORT) != 0:\n            store_i64",
        "        if False:\n            store_i64",
        ("tests/test_invariants.py -k test_8_a_waiting",),
    ),
    Mutant(
        "the clock is not looked at",
        KERNELS + "waiting.py",
        "    if time - since > patience * comm.timeout_ns:\n        return TIMED_OUT\n",
        "",
        ("tests/test_invariants.py -k test_8_what",),
    ),
]

TRANSPORT = [
    Mutant(
        "a request overtakes what is parked for its queue",
        "transport/proxy.py",
        "            batch = batch[np.logical_not(behind)]\n",
        "",
        ("tests/test_fifo_proxy.py -k keeps_its_order", "torture"),
    ),
    Mutant(
        "only the first of the parked requests is posted",
        "transport/proxy.py",
        "self._offer(np.stack(list(line)))",
        "self._offer(np.stack(list(line)[:1]))",
    ),
    Mutant(
        "a full queue holds up all others",
        "transport/proxy.py",
        "            behind = np.array([tuple(queue) in self._parked "
        "for queue in queues])\n",
        "            behind = np.array([True for queue in queues])\n",
        ("tests/test_fifo_proxy.py -k holds_up_no_other",),
    ),
    Mutant(
        "peers do not hear of an abort",
        "transport/proxy.py",
        "        for peer in list(self._untold) if value else []:\n",
        "        for peer in []:\n",
        ("tests/test_fifo_proxy.py -k abort",),
    ),
    Mutant(
        "a request that compiled turns could not post is forgotten",
        "transport/proxy.py",
        "        for position in refused:\n            self._park(self._batch[",
        "        for position in refused[1:]:\n            self._park(self._batch[",
        ("tests/test_fifo_proxy.py -k full_queue",),
    ),
    Mutant(
        "warps may see rows before their coordinator has",
        KERNELS + "receiver.py",
        "arrived_word(comm, src_rank))\n    return max(seen, warp_broadcast(tail))",
        "arrived_word(comm, src_rank))\n    return max(seen, warp_broadcast(tail + 1))",
    ),
    Mutant(
        "drained means that the FIFO is empty",
        "transport/proxy.py",
        "not self._fifo.is_empty() or self._working:",
        "not self._fifo.is_empty():",
        ("tests/test_fifo_proxy.py -k drain",),
    ),
    Mutant(
        "a counter is written before its data",
        "transport/shm.py",
        "        base = peers[peer]\n        if",
        "        base = peers[peer]\n"
        "        store_release(base + batch[i, wr.COUNTER_AT], 0, batch[i, wr.VALUE])\n"
        "        if",
        ("compiled tests/test_transport.py -k every_word",),
    ),
    Mutant(
        "nothing orders streamed data before its counter",
        "transport/shm.py",
        "            stream_fence()\n",
        "",
        ("compiled tests/test_transport.py -k streamed_lines",),
    ),
    Mutant(
        "pages of shared memory are not reserved",
        "transport/shm.py",
        "            os.posix_fallocate(file, 0, num_bytes)\n",
        "            os.ftruncate(file, num_bytes)\n",
        ("compiled tests/test_transport.py -k c55",),
    ),
]

VERBS = [
    Mutant(
        "a farewell whose answer is lost is a failure",
        "transport/proxy.py",
        "if peer not in (-1, self.rank) and read_word",
        "if peer < -1 and read_word",
        ("tests/test_verbs.py -k answer_to_a_farewell",),
    ),
    Mutant(
        "a card is asked before its peer is ready",
        "transport/verbs.py",
        "if self._all_connected and queue.error is None",
        "if queue.error is None",
        ("tests/test_verbs.py -k on_another_host",),
    ),
    Mutant(
        "words for the host are written to the GPU",
        "transport/verbs_queue.py",
        "if at < queue.host_bytes:",
        "if at < 0:",
        ("tests/test_verbs_cuda.py -k host_reads",),
    ),
    Mutant(
        "GPU memory is given back while kernels run",
        "transport/verbs_resources.py",
        "            self._memory.clear()",
        "            pass",
        ("tests/test_verbs_cuda.py -k still_use",),
    ),
]

DEVICE = [
    Mutant(
        "nothing orders a streamed row before its release",
        "numba_ep/device/cpu.py",
        "def st_release(base: int, index: int, value: int) -> None:\n"
        "    stream_fence()\n",
        "def st_release(base: int, index: int, value: int) -> None:\n",
        ("compiled tests/test_device_names.py -k streamed_lines",),
    ),
    Mutant(
        "the last bytes of a row are not copied",
        "transport/atomics_jit.py",
        "num_bytes - done)",
        "(num_bytes - done) // 16 * 16)",
        ("compiled tests/test_device_names.py -k copy_row",),
    ),
    Mutant(
        "e4m3 rounds ties up",
        "numba_ep/device/memory_ir.py",
        "half_up = builder.add(builder.add(clipped, const(0x7FFFF)), odd)",
        "half_up = builder.add(clipped, const(0x80000))",
        ("compiled tests/test_device_names.py -k store_e4m3",),
    ),
    Mutant(
        "bfloat16 sums are cut, not rounded",
        "numba_ep/device/cpu_rows.py",
        "rounded = builder.lshr(builder.add(bits, bias), _splat(16))",
        "rounded = high",
        ("compiled tests/test_device_names.py -k bf16_rounding",),
    ),
    Mutant(
        "scales are float64 before they are stored",
        KERNELS + "cast.py",
        "E4M3_MAX = np.float32(448.0)",
        "E4M3_MAX = 448.0",
        ("compiled tests/test_device_names.py -k cast_kernel",),
    ),
]

HOST = [
    Mutant(
        "a handle of another Buffer is taken",
        "numba_ep/checks.py",
        "if handle.owner is not owner:",
        "if False:",
        ("tests/test_cases_b.py -k c32",),
    ),
    Mutant(
        "a slot has no room for weights",
        "numba_ep/slot.py",
        "(TOPK_ID_BYTES + TOPK_WEIGHT_BYTES) * num_topk",
        "TOPK_ID_BYTES * num_topk",
    ),
    Mutant(
        "destroy does not wait for the peers' farewells",
        "numba_ep/endpoint.py",
        "                while not read_word(base + queue * LINE_BYTES):\n",
        "                while False:\n",
        ("tests/test_invariants.py -k test_9_nobody",),
    ),
    Mutant(
        "a failure after the verdict is kept to oneself",
        "numba_ep/operation.py",
        "            self.endpoint.runtime.abort()\n            raise\n",
        "            raise\n",
        ("tests/test_invariants.py -k test_3_a_failure",),
    ),
]

TRACE = [
    Mutant(
        "a recorder writes behind its ring",
        KERNELS + "tracing.py",
        "(made & (comm.trace_records - 1))",
        "made",
        ("tests/test_trace.py -k lost",),
    ),
    Mutant(
        "a recorder counts credit twice",
        KERNELS + "channel.py",
        "rows = consumed - returned",
        "rows = consumed",
        ("tests/test_trace.py -k credited",),
    ),
    Mutant(
        "a recorder takes a wait's end for its beginning",
        KERNELS + "waiting.py",
        "goes_on, since, looked, 0, 0)",
        "goes_on, looked, since, 0, 0)",
        ("tests/test_trace.py -k in_order",),
    ),
    Mutant(
        "a flow of the recorder ends a chunk too late",
        "numba_ep/perfetto.py",
        "chunks[-1][0] <= value:",
        "chunks[-1][0] < value:",
        ("tests/test_trace.py -k has_one_flow",),
    ),
]

MUTANTS = [
    *CHANNEL, *FIFO, *SENDER, *RECEIVER, *NOTIFY, *COMBINE, *WAITING, *TRANSPORT,
    *VERBS, *DEVICE, *HOST, *TRACE,
]  # fmt: skip
