"""One ring under the magnifying glass: its slots, tail and head over time.

    with numba_ep.trace.record(buffer) as t:
        buffer.dispatch(..., config=config)
    movie = numba_ep.view.animate(t, config, src_rank=0, dst_rank=1)
    movie.save("ring.gif", "pillow")             # or movie.to_jshtml() in a notebook

Above the source's send ring, below it the ring at the destination that mirrors it, at
the bottom the counters as the source knows them. What is drawn comes from
ring_history.py. Needs matplotlib. Rings of up to some 64 slots are readable.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ep.config import Config
from numba_ep.ring_history import (
    ARRIVED,
    CREDITED,
    PACKED,
    PUBLISHED,
    READ,
    RETURNED,
    STAGES,
    Ring,
    Slots,
    follow,
)
from numba_ep.trace import Trace

__all__ = ["Ring", "animate", "draw", "follow"]

# By stage: Okabe and Ito's colours, a hatch that says the same, the text's colour.
LOOK = {
    PACKED: ("#e69f00", "", "black"),
    PUBLISHED: ("#f0e442", "////", "black"),
    ARRIVED: ("#0072b2", "", "white"),
    READ: ("#56b4e9", "", "black"),
    RETURNED: ("#cc79a7", "....", "black"),
    CREDITED: ("white", "", "#999999"),
}
TAIL, HEAD, INK = "#d55e00", "#009e73", "#222222"
SLOTS_A_LINE, LINE_HEIGHT = 32, 2.8  # in slots, with room for tail and head


def animate(
    trace: Trace,
    config: Config,
    src_rank: int = 0,
    dst_rank: int = 1,
    channel: int = 0,
    operation: int | None = None,
    num_frames: int = 120,
    interval_ms: int = 150,
) -> Any:
    """A matplotlib FuncAnimation of one ring in one operation; None: the first one.

    Every change is a frame of `interval_ms`, up to `num_frames` of them; the clock
    tells the time. config: the operation's. ValueError: see `follow`.
    """
    from matplotlib.animation import FuncAnimation

    picture = _Picture(follow(trace, config, src_rank, dst_rank, channel, operation))
    moments = picture.ring.moments(num_frames).tolist()
    return FuncAnimation(
        picture.figure, picture.show, frames=moments, interval=interval_ms,
        repeat_delay=10 * interval_ms,
    )  # fmt: skip


def draw(ring: Ring, now: int) -> Any:
    """The ring at one time, in ns; returns the Figure."""
    picture = _Picture(ring)
    picture.show(now)
    return picture.figure


class _Picture:
    """The figure, and what changes in it."""

    def __init__(self, ring: Ring) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.ring = ring
        self.first = int(ring.moments(1)[0])
        end = LINE_HEIGHT * -(-ring.capacity // SLOTS_A_LINE)
        # Without pyplot: nothing is kept alive, and no window system is asked.
        self.figure = Figure(figsize=(8, 2.3 + 0.7 * end), layout="constrained")
        FigureCanvasAgg(self.figure)
        axes = self.figure.subplots(3, 1, height_ratios=[end, end, 3.2])
        self.clock = self.figure.suptitle(" ", fontsize=11)
        self.ends = [
            _End(ax, f"rank {rank}: {name}", ring.capacity)
            for ax, rank, name in (
                (axes[0], ring.src_rank, "send ring"),
                (axes[1], ring.dst_rank, "receive ring"),
            )
        ]
        self._legend(axes[1])
        self.cursor = self._counters(axes[2])
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")  # once: frames are drawn faster

    def show(self, now: int) -> list[Any]:
        """Change the figure to what it was at `now`, in ns."""
        ring, us = self.ring, (now - self.first) / 1000
        self.clock.set_text(
            f"channel {ring.channel}, rank {ring.src_rank} to rank {ring.dst_rank}: "
            f"{us:.1f} us"
        )
        for end, slots in zip(self.ends, ring.at(now)):
            end.show(slots)
        self.cursor.set_xdata([us, us])
        return []

    def _legend(self, ax: Any) -> None:
        from matplotlib.patches import Patch

        handles = [
            Patch(facecolor=colour, hatch=hatch, edgecolor=INK, label=STAGES[stage])
            for stage, (colour, hatch, _) in LOOK.items()
        ]
        ax.legend(handles=handles, ncols=len(handles), fontsize=8, frameon=False,
                  loc="upper center", bbox_to_anchor=(0.5, 0.02))  # fmt: skip

    def _counters(self, ax: Any) -> Any:
        ring, rows = self.ring, len(self.ring.times)
        moments = ring.moments(len(ring.times) * len(STAGES) + 1)
        us = (moments - self.first) / 1000
        tail = np.array([ring.reached(PUBLISHED, now) for now in moments.tolist()])
        head = np.array([ring.reached(CREDITED, now) for now in moments.tolist()])
        limit = np.minimum(head + ring.capacity, rows)
        ax.step(us, limit, INK, linestyle=":", where="post", label="head + capacity")
        ax.step(us, tail, TAIL, where="post", label="tail")
        ax.step(us, head, HEAD, where="post", linestyle="--", label="head")
        ax.set_ylabel(f"rank {ring.src_rank}: rows")
        ax.set_xlabel("time, us")
        ax.legend(ncols=3, fontsize=8, frameon=False, loc="lower right",
                  bbox_to_anchor=(1.0, 0.95))  # fmt: skip
        return ax.axvline(0.0, color=INK, linewidth=1)


class _End:
    """One end of the ring: a cell a slot, tail above, head below."""

    def __init__(self, ax: Any, name: str, capacity: int) -> None:
        from matplotlib.patches import Rectangle

        self.capacity = capacity
        self.ax, self.cells, self.numbers = ax, [], []
        columns = min(capacity, SLOTS_A_LINE)
        lines = -(-capacity // SLOTS_A_LINE)
        middle = {"ha": "center", "va": "center", "fontsize": 9 if columns <= 16 else 7}
        for slot in range(capacity):
            x, y = self._corner(slot)
            self.cells.append(ax.add_patch(Rectangle((x, y), 1, 1, edgecolor=INK)))
            self.numbers.append(ax.text(x + 0.5, y + 0.45, "", **middle))
        self.tail = ax.text(0, 0, "", color=TAIL, ha="center", va="bottom", fontsize=9)
        self.head = ax.text(0, 0, "", color=HEAD, ha="center", va="top", fontsize=9)
        ax.set_title(name, loc="left", fontsize=10)
        ax.set_xlim(-0.5, columns + 0.5)
        ax.set_ylim(lines * LINE_HEIGHT - 1, -1)
        ax.axis("off")

    def _corner(self, slot: int) -> tuple[float, float]:
        return slot % SLOTS_A_LINE, LINE_HEIGHT * (slot // SLOTS_A_LINE)

    def show(self, slots: Slots) -> None:
        """Colour and number every slot, move the counters."""
        from matplotlib.patheffects import withStroke

        for row, stage, cell, number in zip(
            slots.rows.tolist(), slots.stages.tolist(), self.cells, self.numbers
        ):
            colour, hatch, ink = LOOK[stage]
            cell.set_facecolor(colour)
            cell.set_hatch(hatch)
            number.set_text("" if row < 0 else str(row))
            number.set_color(ink)
            # Readable on a hatch, too.
            number.set_path_effects([withStroke(linewidth=3, foreground=colour)])
        for mark, count, text, below in (
            (self.tail, slots.tail, f"tail {slots.tail}\n\u25bc", 0.0),
            (self.head, slots.head, f"\u25b2\nhead {slots.head}", 1.0),
        ):
            x, y = self._corner(count % self.capacity)
            mark.set_position((x, y + below))
            mark.set_text(text)
