"""What the notebooks share: colours, check marks, pictures of matrices, source code."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler

# Their arrays are NumPy's, so their kernels run on the CPU, also where there is a GPU.
os.environ["NUMBA_EP_DEVICE"] = "cpu"

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
SKY, PINK, YELLOW, GREY = "#56b4e9", "#cc79a7", "#f0e442", "#d0d0d0"
COLOURS = [BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY]

mpl.rcParams.update({
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "font.size": 11,
})  # fmt: skip


def check(text: str, is_right: Any) -> None:
    """Print `text` behind a green mark, or raise AssertionError."""
    if not is_right:
        raise AssertionError(f"❌ {text}")
    print(f"✅ {text}")


def exercise(text: str, answer: Any, is_right: Callable[[Any], Any]) -> None:
    """`check` the reader's answer; `...` is none yet."""
    if answer is ...:
        print(f"⬜ your turn: {text}")
    else:
        check(text, is_right(answer))


def ink_on(colour: Any) -> str:
    """Black or white, whichever is readable on `colour`."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def draw_matrix(
    ax: Any, matrix: Any, title: str, rows: str, columns: str, largest: Any = None
) -> None:
    """Numbers in shades of blue, each with its number; `largest` is the darkest."""
    matrix = np.asarray(matrix)
    image = ax.imshow(matrix, cmap="Blues", vmin=0, vmax=largest, aspect="auto")
    for (row, column), value in np.ndenumerate(matrix):
        colour = image.cmap(image.norm(value))
        ax.text(column, row, value, ha="center", va="center", color=ink_on(colour))
    ax.set(title=title, xlabel=columns, ylabel=rows)
    ax.set_xticks(range(matrix.shape[1]))
    ax.set_yticks(range(matrix.shape[0]))
    ax.spines[:].set_visible(False)


def draw_rows(
    ax: Any, src_ranks: Any, labels: Any, y: float = 0, first: int = 0
) -> None:
    """A line of boxes, one a row: the colour is its source rank, the text its label."""
    for x, (src_rank, label) in enumerate(zip(src_ranks, labels), start=first):
        colour = COLOURS[src_rank]
        ax.add_patch(mpl.patches.Rectangle((x - 0.45, y - 0.4), 0.9, 0.8, color=colour))
        ax.text(x, y, label, ha="center", va="center", color=ink_on(colour))


def legend_of_ranks(ax: Any, num_ranks: int, title: str = "") -> None:
    """What the colours of `draw_rows` mean, at the right."""
    handles = [
        mpl.patches.Patch(color=COLOURS[rank], label=f"from rank {rank}")
        for rank in range(num_ranks)
    ]
    ax.legend(handles=handles, loc="center right", frameon=False, title=title)


def show_source(*parts: Any) -> Any:
    """Functions, kernels, classes or texts as Python code, for a cell's last line."""
    from IPython.display import Markdown

    texts = [
        part if isinstance(part, str)
        else inspect.getsource(getattr(part, "py_func", part))
        for part in parts
    ]  # fmt: skip
    code = "\n\n".join(textwrap.dedent(text).strip() for text in texts)
    return Markdown(f"```python\n{code}\n```")
