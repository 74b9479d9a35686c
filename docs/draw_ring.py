"""Draws docs/ring.gif, a ring whose receiver is slower: python docs/draw_ring.py [FILE]

Four ranks run for it as threads, and all their tokens go to rank 1: three senders that
rank 1 alone has to keep up with, so that credit runs out. Every run differs a little.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from PIL import Image

import numba_ep

NUM_RANKS, NUM_EXPERTS, HOT_EXPERT = 4, 8, 2
NUM_TOKENS, HIDDEN = 40, 7168
NUM_FRAMES, FRAME_MS = 90, 200
CONFIG = numba_ep.Config(2, 4, 16, 4, 16)  # one channel, chunks of 4, rings of 16 slots


def program(group: Any) -> Any:
    """Dispatch twice on every rank, the second time recorded; the trace."""
    num_bytes = CONFIG.get_rdma_buffer_size_hint(2 * HIDDEN, NUM_RANKS)
    x = np.ones((NUM_TOKENS, HIDDEN), ml_dtypes.bfloat16)
    topk_idx = np.full((NUM_TOKENS, 1), HOT_EXPERT)
    numba_ep.Buffer.set_num_sms(CONFIG.num_sms)
    with numba_ep.Buffer(group, num_rdma_bytes=num_bytes, device="cpu") as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            topk_idx, NUM_EXPERTS
        )

        def dispatch() -> None:
            buffer.dispatch(
                x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert, config=CONFIG,
            )  # fmt: skip

        dispatch()
        with numba_ep.trace.record(buffer) as trace:
            dispatch()
    return trace


def main() -> None:
    """Record, draw, write."""
    default = Path(__file__).with_name("ring.gif")
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    trace = numba_ep.spawn(program, NUM_RANKS, 120.0)[0]
    ring = numba_ep.view.follow(trace, CONFIG, src_rank=0, dst_rank=1)
    frames: list[Image.Image] = []
    for now in ring.moments(NUM_FRAMES).tolist():
        print(f"\rframe {len(frames) + 1} of {NUM_FRAMES}", end="", flush=True)
        canvas = numba_ep.view.draw(ring, now).canvas
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    # One palette for all: each frame's own would change the rarer colours.
    palette = frames[len(frames) // 2].quantize(64, Image.Quantize.MAXCOVERAGE)
    first, *others = (
        frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames
    )
    first.save(file, save_all=True, append_images=others, duration=FRAME_MS, loop=0)
    print(f"\n{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
