"""Dispatch and combine for Mixture-of-Experts on machines without NVLink.

Importing this loads no kernel and starts neither CUDA nor MPI: the first Buffer does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Not lazily: a function and its module share the name, and the module would win.
from numba_ep.spawn import spawn

if TYPE_CHECKING:
    from numba_ep.buffer import Buffer
    from numba_ep.cast import cast_to_fp8
    from numba_ep.config import Config
    from numba_ep.errors import BufferAborted, PeerTimeout, RefusedError
    from numba_ep.group import world
    from numba_ep.handle import EventOverlap, Handle

__version__ = "0.1.0"

_WHERE = {
    "Buffer": "buffer",
    "BufferAborted": "errors",
    "Config": "config",
    "EventOverlap": "handle",
    "Handle": "handle",
    "PeerTimeout": "errors",
    "RefusedError": "errors",
    "cast_to_fp8": "cast",
    "world": "group",
}

__all__ = [
    "Buffer", "BufferAborted", "Config", "EventOverlap", "Handle", "PeerTimeout",
    "RefusedError", "cast_to_fp8", "spawn", "world",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("trace", "view"):  # the modules themselves
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
