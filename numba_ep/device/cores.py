"""How many cores a rank's threads have."""

from __future__ import annotations

import os
import warnings


def warn_of_one_core(name: str) -> None:
    """Where kernels run on a GPU, a rank's proxy and its caller both poll."""
    if len(os.sched_getaffinity(0)) < 2 <= (os.cpu_count() or 1):
        warnings.warn(
            f"{name}: all its threads are bound to one core, which makes every "
            "operation wait for the scheduler; with Open MPI run mpirun --bind-to none",
            stacklevel=2,
        )
