"""What every role of every channel and the proxy did, and when.

    with numba_ep.trace.record(buffer) as t:     # collective, as are its operations
        buffer.dispatch(...)
    t.write("out.json")                          # for ui.perfetto.dev
    numba_ep.trace.plot(t).savefig("out.png")

Kernels record into rings in their own memory (kernels/tracing.py), one record a chunk
or a wait; the proxy logs what it posts (transport/post_log.py). Nobody else is asked,
and nothing is moved, before the block ends: then every rank gets all ranks' events.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from numba_ep import clocks
from numba_ep.group import members
from numba_ep.kernels import events as words
from numba_ep.kernels.records import LINE_BYTES
from transport import post_log, wr

DEFAULT_CAPACITY = 1024
FIELDS = ("rank", "kind", "channel", "warp", "peer", "start_ns", "end_ns", "value",
          "count", "operation", "num_bytes")  # fmt: skip
EVENT = np.dtype([(name, np.int64) for name in FIELDS])
RING_WORDS = LINE_BYTES // 8


class Trace:
    """The events of all ranks, once the `record` block has ended.

    events: [n] EVENT by start. kind: see kernels/events.py, KINDS. Times are rank 0's
    CLOCK_MONOTONIC. peer: -1 where there is none. value: tail or head, which count
    over the Buffer's life; in notify the operation. count: rows; of the proxy requests.
    operation: -1 where it is not known. num_bytes: what the proxy posted.
    lost: [num_ranks] how many older events had no room.
    error_ns: [num_ranks] how far a rank's times may be off, host and kernels together.
    """

    def __init__(self) -> None:
        self.events = np.empty(0, EVENT)
        self.lost: list[int] = []
        self.error_ns: list[int] = []

    def write(self, path: str | Path) -> None:
        """Write Chrome's JSON, which ui.perfetto.dev and chrome://tracing open."""
        from numba_ep.perfetto import document

        Path(path).write_text(json.dumps(document(self.events, self.lost)) + "\n")


def plot(trace: Trace, ax: Any = None) -> Any:
    """Draw the events, a line for each role of each channel; returns the Figure."""
    from numba_ep.trace_plot import draw

    return draw(trace.events, ax)


@contextlib.contextmanager
def record(buffer: Any, capacity: int = DEFAULT_CAPACITY) -> Iterator[Trace]:
    """Record what happens on `buffer` in the block. Collective at both ends.

    capacity: events a warp and the proxy keep, the newest; rounded up to a power of
    two. ValueError: it is not positive. RuntimeError: somebody records already. Where
    the block raises, the trace has the events of this rank alone.
    """
    if capacity < 1:
        raise ValueError(f"capacity: expected 1 or more, got {capacity}")
    endpoint, group, trace = buffer._endpoint, members(buffer.group), Trace()
    if endpoint.comm.trace:
        raise RuntimeError("trace: this Buffer is being recorded already")
    group.barrier()  # a GPU may not give memory while a peer's kernel waits for us
    recorder = _Recorder(endpoint, 1 << (capacity - 1).bit_length())
    group.barrier()
    recorder.start()
    try:
        yield trace
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the first error says what is wrong
            trace.events, lost = recorder.stop()
            trace.lost = [lost]
        raise
    own, lost = recorder.stop()
    kernels, host = clocks.of_kernels(endpoint, recorder.word), clocks.of_rank(group)
    is_kernel = own["kind"] < words.POST_CHUNK
    for name in ("start_ns", "end_ns"):
        own[name] += host.ns + np.where(is_kernel, kernels.ns, 0)
    parts = group.allgather((own, lost, kernels.error_ns + host.error_ns))
    trace.events = in_order(np.concatenate([part[0] for part in parts]))
    trace.lost = [part[1] for part in parts]
    trace.error_ns = [part[2] for part in parts]


def in_order(events: np.ndarray) -> np.ndarray:
    """By start; what encloses another event comes before it."""
    return events[np.lexsort((-events["end_ns"], events["start_ns"]))]


class _Recorder:
    """One rank's memory for records, from `start` to `stop`."""

    def __init__(self, endpoint: Any, records: int) -> None:
        self.endpoint, self.records = endpoint, records
        device = endpoint.device
        self.warps = max(device.WARPS_PER_BLOCK, device.ONE_BLOCK_WARPS)
        rings = 2 * endpoint.settings.max_channels * self.warps
        num_bytes = rings * words.ring_bytes(records)
        # A Buffer keeps its memory; the next trace of the same size takes it again.
        kept = endpoint.trace_memory
        if kept is None or kept[0].num_bytes != num_bytes:
            runtime = endpoint.runtime
            kept = runtime.allocate(num_bytes), runtime.allocate_host(8)
            endpoint.trace_memory = kept
        self.memory, self.word = kept
        self.log = post_log.PostLog(records)
        self.before = self._rings()[:, 0].copy()

    def _rings(self) -> np.ndarray:
        """[rings, words] int64: each ring's line, then its records."""
        host = self.memory.host
        if host is None:
            host = self.endpoint.runtime.copy_to_host(self.memory)
        size = words.ring_bytes(self.records) // 8
        return np.asarray(host.view(np.int64).reshape(-1, size))

    def start(self) -> None:
        """Kernels and proxy record from their next step on."""
        self._set(self.memory.address, self.records)
        self.endpoint.proxy.record(self.log)

    def pause(self) -> None:
        """They do not any more, until the next `start`."""
        self._set(0, 0)
        self.endpoint.proxy.record(None)

    def stop(self) -> tuple[np.ndarray, int]:
        """`pause`; this rank's events by its own clocks, and how many are lost."""
        self.pause()
        own, lost = self._kernel_events()
        posts = self._proxy_events()
        events = np.concatenate([own, posts])
        events["rank"] = self.endpoint.rank
        return in_order(events), lost + self.log.made - len(posts)

    def _set(self, address: int, records: int) -> None:
        endpoint = self.endpoint
        endpoint.comm = endpoint.comm._replace(trace=address, trace_records=records)

    def _kernel_events(self) -> tuple[np.ndarray, int]:
        rings, lost, parts = self._rings(), 0, [np.empty(0, EVENT)]
        for number in np.flatnonzero(rings[:, 0] > self.before):
            before, made = int(self.before[number]), int(rings[number, 0])
            first = max(before, made - self.records)
            lost += first - before
            table = rings[number, RING_WORDS:].reshape(-1, words.RECORD_WORDS)
            rows = table[np.arange(first, made) % self.records]
            parts.append(_of_records(rows, int(number) % self.warps))
        return np.concatenate(parts), lost

    def _proxy_events(self) -> np.ndarray:
        rows = self.log.newest()
        events = np.zeros(len(rows), EVENT)
        for name, word in (
            ("start_ns", post_log.START), ("end_ns", post_log.END),
            ("peer", post_log.PEER), ("channel", post_log.QUEUE),
            ("value", post_log.VALUE), ("num_bytes", post_log.NUM_BYTES),
        ):  # fmt: skip
            events[name] = rows[:, word]
        events["count"], events["operation"] = 1, -1
        put = rows[:, post_log.OPCODE] == wr.PUT
        at, places = rows[:, post_log.COUNTER_AT], self.endpoint._receive_map
        events["kind"] = words.POST_OTHER
        for name, kind in (
            ("tails", words.POST_CHUNK), ("heads", words.POST_CREDIT),
            ("row counters", words.POST_ROW),
        ):  # fmt: skip
            first, size = places[name], places.sizes[name]
            events["kind"][(at >= first) & (at < first + size)] = kind
        done = rows[:, post_log.OPCODE] == post_log.DONE
        events["kind"][done] = words.COMPLETE
        events["count"][done] = rows[done, post_log.NUM_BYTES]
        events["num_bytes"][~put] = 0
        return events


def _of_records(rows: np.ndarray, warp: int) -> np.ndarray:
    """Events of one warp's records."""
    events = np.zeros(len(rows), EVENT)
    for name, word in (
        ("kind", words.KIND), ("channel", words.CHANNEL), ("peer", words.PEER),
        ("start_ns", words.START), ("end_ns", words.END), ("value", words.VALUE),
        ("count", words.COUNT), ("operation", words.OPERATION),
    ):  # fmt: skip
        events[name] = rows[:, word]
    events["warp"] = warp
    # Not every warp of notify sees the new number before it records.
    notify = np.isin(events["kind"], (words.SEND_ROW, words.WAIT_ROW))
    events["operation"][notify] = events["value"][notify]
    return events
