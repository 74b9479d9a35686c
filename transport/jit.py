"""Compile host helpers, or leave them plain Python when `NUMBA_DISABLE_JIT=1`.

Numba keys a cached function on the source file of that function alone: after an edit in
a helper module the stale machine code of its callers would be loaded. So the cache
lives in a folder whose name is a hash of every source file of the packages it serves;
an edit anywhere opens a new folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config

JIT_DISABLED = bool(config.DISABLE_JIT)


def sources_hash(*folders: Path) -> str:
    """Sixteen hex digits over path and content of every `.py` file below `folders`."""
    digest = hashlib.sha256(f"numba {numba.__version__}".encode())
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder(name: str, *folders: Path) -> str | None:
    """The compile cache of the sources below `folders`, or None where none is writable.

    `NUMBA_EP_CACHE_DIR`, then `$XDG_CACHE_HOME` or `~/.cache`, then the system's folder
    for temporary files (one per user, refused if it belongs to somebody else).
    """
    own_temporary = Path(tempfile.gettempdir()) / f"numba_ep-{os.getuid()}"
    xdg = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    chosen = os.environ.get("NUMBA_EP_CACHE_DIR")
    roots = [Path(chosen)] if chosen else [Path(xdg) / "numba_ep", own_temporary]
    for root in roots:
        folder = root / f"{name}-{sources_hash(*folders)}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                return str(folder)
        except OSError:
            continue
    return None


def _with_forgiving_cache(compiled: Any) -> Any:
    """A cache file that was cut short, by a full disk say, means: compile again."""
    cache = compiled._cache
    load = cache.load_overload

    def load_overload(*args: Any) -> Any:
        try:
            return load(*args)
        except Exception:  # noqa: BLE001 (unpickling damaged bytes may raise anything)
            cache.flush()
            return None

    cache.load_overload = load_overload
    return compiled


class Compiler:
    """`jit` for one package: nogil, cached in that package's own folder."""

    def __init__(self, name: str, *folders: Path) -> None:
        self.folder = None if JIT_DISABLED else cache_folder(name, *folders)

    def jit(self, fn: Callable[..., Any], cache: bool = True, **options: Any) -> Any:
        """Compile `fn` with the GIL released; unchanged when the JIT is disabled."""
        if JIT_DISABLED:
            return fn
        # Numba reads its setting where the function is decorated: lend it our folder
        # for that moment only, so that the caches of other packages stay where they
        # are.
        saved, config.CACHE_DIR = config.CACHE_DIR, self.folder or ""
        try:
            keeps = cache and self.folder is not None
            compiled = numba.njit(
                nogil=True, cache=keeps, error_model="numpy", **options
            )(fn)
            return _with_forgiving_cache(compiled) if keeps else compiled
        finally:
            config.CACHE_DIR = saved

    def jit_inline(self, fn: Callable[..., Any]) -> Any:
        """Compile `fn` into its callers alone, without a cache file of its own."""
        return self.jit(fn, cache=False, inline="always")


host = Compiler("transport", Path(__file__).parent)
