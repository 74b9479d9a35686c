"""Draws docs/dataflow.svg, the journey of a token: python docs/draw_dataflow.py

Colours: Okabe and Ito's, which stay apart for colour-blind readers; nothing is told by
colour alone.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 1000, 520
INK, GREY, PAPER, PANEL = "#222222", "#767676", "#ffffff", "#f5f5f5"
DATA, FREE, NEXT, CREDIT = "#0072b2", "#ffffff", "#56b4e9", "#d55e00"
SLOT = 30
BORDER = 305

Point = tuple[float, float]


def text(
    x: float, y: float, words: str, size: int = 14, anchor: str = "middle",
    colour: str = INK, weight: str = "normal",
) -> str:  # fmt: skip
    """One line of text; y is its base line."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}" font-weight="{weight}">{escape(words)}</text>'
    )


def box(
    x: float, y: float, width: float, height: float, fill: str = PAPER,
    stroke: str = INK, radius: float = 0,
) -> str:  # fmt: skip
    """A rectangle from its upper left corner."""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def arrow(*points: Point, colour: str = INK, width: float = 2) -> str:
    """A line through the points with a head at the last one."""
    name = {INK: "ink", DATA: "data", CREDIT: "credit"}[colour]
    path = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" '
        f'stroke-width="{width}" marker-end="url(#{name})"/>'
    )


def step(x: float, y: float, number: int, colour: str = INK) -> str:
    """A numbered disc."""
    disc = f'<circle cx="{x}" cy="{y}" r="11" fill="{colour}"/>'
    return disc + text(x, y + 5, str(number), colour=PAPER, weight="bold")


def heads() -> str:
    """The arrow heads, one of each colour."""
    markers = [
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="10" '
        f'markerHeight="10" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0,0 L10,5 L0,10 z" fill="{colour}"/></marker>'
        for name, colour in (("ink", INK), ("data", DATA), ("credit", CREDIT))
    ]
    return f"<defs>{''.join(markers)}</defs>"


def rows(x: float, y: float, name: str, marked: int) -> list[str]:
    """A user tensor, one of its rows marked."""
    cells = [
        box(x, y + 18 * i, 110, 18, DATA if i == marked else FREE) for i in range(6)
    ]
    return [text(x + 55, y - 10, name, weight="bold"), *cells]


def ring(x: float, y: float, name: str, fills: str) -> list[str]:
    """A ring of slots: d(ata), n(ext chunk, being filled), . (free)."""
    colours = {"d": DATA, "n": NEXT, ".": FREE}
    inks = {"d": PAPER, "n": INK, ".": GREY}
    parts = [text(x + 4 * SLOT, y - 10, name, weight="bold")]
    for i, fill in enumerate(fills):
        parts.append(box(x + SLOT * i, y, SLOT, SLOT, colours[fill]))
        parts.append(text(x + SLOT * (i + 0.5), y + 20, str(i), 13, colour=inks[fill]))
    chunk = f"M{x},{y + SLOT + 5} v6 h{4 * SLOT - 4} v-6"
    parts.append(f'<path d="{chunk}" fill="none" stroke="{INK}"/>')
    parts.append(text(x + 2 * SLOT, y + SLOT + 28, "a chunk", 13))
    return parts


def counter(x: float, y: float, words: str, colour: str) -> str:
    """A counter word."""
    return box(x, y, 84, 26, PAPER, colour, 3) + text(
        x + 42, y + 18, words, 14, colour=colour, weight="bold"
    )


def fifo_and_proxy(x: float) -> list[str]:
    """What stands between a kernel and the network card, on either side."""
    fills = (NEXT, FREE, FREE)
    cells = [box(x + SLOT * i, 262, SLOT, SLOT, fill) for i, fill in enumerate(fills)]
    return [
        text(x - 10, 282, "FIFO", anchor="end", weight="bold"),
        *cells,
        box(x - 25, 340, 140, 46, PAPER, INK, 8),
        text(x + 45, 360, "proxy", weight="bold"),
        text(x + 45, 377, "(host thread)", 13),
        arrow((x + 45, 292), (x + 45, 338)),
    ]


def panels() -> list[str]:
    """The two ranks and what lies between them."""
    return [
        box(0, 0, WIDTH, HEIGHT, PAPER, PAPER),
        box(12, 12, 448, 416, PANEL, GREY, 8),
        box(540, 12, 448, 416, PANEL, GREY, 8),
        text(236, 38, "source rank s", 16, weight="bold"),
        text(764, 38, "destination rank d", 16, weight="bold"),
        box(470, 80, 60, 348, PAPER, GREY, 8),
        text(500, 52, "network", 14, weight="bold"),
        text(500, 69, "card", 14, weight="bold"),
        *border(12, 448),
        *border(540, 448),
    ]


def border(x: float, width: float) -> list[str]:
    """Where the kernel's side ends and the host's begins."""
    dashed = f"M{x},{BORDER} h{width}"
    return [
        f'<path d="{dashed}" fill="none" stroke="{GREY}" stroke-dasharray="5 4"/>',
        text(x + 14, BORDER - 8, "kernel", 13, "start", GREY),
        text(x + 14, BORDER + 18, "host", 13, "start", GREY),
    ]


def legend() -> list[str]:
    """What the numbers mean, in three columns."""
    steps = [
        (1, DATA, "sender warps copy rows into slots"),
        (2, INK, "coordinator: a FIFO entry a chunk"),
        (3, INK, "the proxy pops it and posts"),
        (4, DATA, "a write of the chunk, then of tail"),
        (5, DATA, "receiver warps copy rows out"),
        (6, CREDIT, "head goes back: slots are free"),
    ]
    parts = []
    for i, (number, colour, words) in enumerate(steps):
        x, y = 36 + 330 * (i // 2), 460 + 32 * (i % 2)
        parts += [step(x, y, number, colour), text(x + 20, y + 5, words, 15, "start")]
    return parts


def token() -> list[str]:
    """The way of the data, steps 1 to 5."""
    return [
        *rows(30, 92, "x", 2),
        *ring(210, 92, "send ring", "ddddnn.."),
        *ring(550, 92, "receive ring", "dddd...."),
        *rows(860, 92, "recv_x", 3),
        arrow((140, 137), (172, 137), (172, 107), (208, 107), colour=DATA),
        step(172, 122, 1, DATA),
        arrow((360, 122), (360, 230), (300, 230), (300, 260)),
        step(360, 205, 2),
        *fifo_and_proxy(255),
        step(300, 311, 3),
        arrow((450, 107), (548, 107), colour=DATA, width=4),
        step(500, 107, 4, DATA),
        arrow((370, 363), (440, 363), (440, 193), (578, 193), colour=DATA),
        step(500, 193, 4, DATA),
        counter(580, 180, "tail 44", DATA),
        arrow((790, 107), (825, 107), (825, 155), (858, 155), colour=DATA),
        step(825, 131, 5, DATA),
    ]


def credit() -> list[str]:
    """The way back of free slots, step 6."""
    return [
        arrow((825, 157), (825, 230), (745, 230), (745, 260), colour=CREDIT),
        step(825, 205, 6, CREDIT),
        *fifo_and_proxy(700),
        arrow((675, 372), (560, 372), (560, 335), (410, 335), (410, 222), (230, 222),
              (230, 207), colour=CREDIT),
        step(500, 335, 6, CREDIT),
        counter(188, 180, "head 40", CREDIT),
    ]  # fmt: skip


def drawing() -> str:
    """The whole picture."""
    parts = [*panels(), *token(), *credit(), *legend()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img">\n'
        "<title>A token's journey from a user row over the send ring, the network and "
        "the receive ring to a user row; its credit goes back</title>\n"
        + "\n".join([heads(), *parts])
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    path = Path(__file__).with_name("dataflow.svg")
    path.write_text(drawing(), encoding="utf-8")
    print(f"wrote {path}")
