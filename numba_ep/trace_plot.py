"""A trace as a picture: time to the right, a line for each role of each channel."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ep.kernels import events as words
from numba_ep.perfetto import track_name, tracks

# Okabe and Ito's colours, which the colour-blind can tell apart; waits are grey.
# In this order: a later bar covers an earlier one, as a wait within a reduction.
COLOURS = {
    "reduce": "#56b4e9",
    "wait": "#d0d0d0",
    "send row": "#f0e442",
    "pack": "#e69f00",
    "publish": "#d55e00",
    "post": "#0072b2",
    "unpack": "#009e73",
    "return credit": "#cc79a7",
    "complete": "#000000",
}
INCHES_A_LINE = 0.24


def colour_name(kind: int) -> str:
    """What an event of this kind is called in the legend."""
    name = words.KINDS[kind][1]
    first = name.partition(" ")[0]
    return first if first in ("wait", "post") else name


def draw(events: np.ndarray, ax: Any = None) -> Any:
    """Draw into `ax`, or a new figure; returns the Figure. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lines = tracks(events)
    if ax is None:
        # Without pyplot: nothing is kept alive, and no window system is asked.
        height = max(2.0, 1.2 + INCHES_A_LINE * len(lines))
        ax = Figure(figsize=(11, height), layout="constrained").subplots()
    first = int(events["start_ns"].min()) if len(events) else 0
    many = bool((events["warp"] > 0).any())
    names, used = [], set()
    for y, ((rank, role, channel, warp), members) in enumerate(lines.items()):
        names.append(f"rank {rank} {track_name(role, channel, warp, many)}")
        here = events[members]
        of_kind = np.array([colour_name(kind) for kind in here["kind"].tolist()])
        for name in COLOURS:
            chosen = here[of_kind == name]
            if len(chosen):
                used.add(name)
                starts = (chosen["start_ns"] - first) / 1000
                lengths = (chosen["end_ns"] - chosen["start_ns"]) / 1000
                colour = COLOURS[name]
                # A thin edge: what lasts less than a pixel is still seen.
                edge = 0.0 if name in ("wait", "reduce") else 0.8
                ax.broken_barh(
                    list(zip(starts, lengths)), (y - 0.4, 0.8), facecolors=colour,
                    edgecolors=colour, linewidth=edge,
                )  # fmt: skip
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("time, us")
    handles = [Patch(color=c, label=n) for n, c in COLOURS.items() if n in used]
    ax.legend(handles=handles, ncols=max(1, len(handles)), fontsize=8, frameon=False,
              loc="lower center", bbox_to_anchor=(0.5, 1.0))  # fmt: skip
    return ax.figure
