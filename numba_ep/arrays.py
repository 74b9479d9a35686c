"""NumPy, CuPy and torch arrays alike: what comes in decides what comes out.

Kernels get addresses; this module checks an array and makes new ones beside it. Nothing
is copied: an array that does not fit is refused with the way out.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

BFLOAT16 = "bfloat16"
FLOAT8 = "float8_e4m3fn"


class ArgumentError(ValueError):
    """An argument does not fit: its name, what was expected, what came, the way out."""


def module_of(array: Any) -> str:
    """numpy, cupy or torch. Raises TypeError for anything else."""
    name = type(array).__module__.partition(".")[0]
    if name in ("numpy", "ml_dtypes") or isinstance(array, np.ndarray):
        return "numpy"
    if name in ("cupy", "torch"):
        return name
    raise TypeError(
        "expected a NumPy, CuPy or torch array, got "
        f"{type(array).__module__}.{type(array).__name__}"
    )


def dtype_name(array: Any) -> str:
    """bfloat16, float8_e4m3fn, float32, int64, int32, bool, ..."""
    return str(array.dtype).rpartition(".")[2]


def _has_dtype(array: Any, dtypes: tuple[str, ...]) -> bool:
    """CuPy has no float8: there the codes go as uint8."""
    name = dtype_name(array)
    as_codes = name == "uint8" and FLOAT8 in dtypes and module_of(array) == "cupy"
    return as_codes or name in dtypes


def address(array: Any) -> int:
    """Address of element 0."""
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    if module_of(array) == "torch":
        return int(array.data_ptr())
    return int(array.data.ptr)


def current_stream(array: Any) -> int:
    """Handle of the stream on which the caller works with arrays like this one."""
    if module_of(array) == "torch":
        return int(sys.modules["torch"].cuda.current_stream().cuda_stream)
    return int(sys.modules["cupy"].cuda.get_current_stream().ptr)


def element_strides(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    if module_of(array) == "torch":
        return tuple(array.stride())
    return tuple(s // array.dtype.itemsize for s in array.strides)


def _is_contiguous(array: Any) -> bool:
    if module_of(array) == "torch":
        return bool(array.is_contiguous())
    return bool(array.flags.c_contiguous)


def _is_on_gpu(array: Any) -> bool:
    module = module_of(array)
    return module == "cupy" or (module == "torch" and array.device.type == "cuda")


def check(
    name: str, array: Any, dtypes: tuple[str, ...], shape: tuple[int | None, ...],
    on_gpu: bool, contiguous: bool = True,
) -> Any:  # fmt: skip
    """`array` if it has one of `dtypes` and `shape` (None: any size), else raise.

    Raises TypeError for what is no array, ArgumentError for a wrong dtype, shape,
    layout or place. On a GPU rows are read 16 bytes at a time: the address must allow
    it.
    """
    try:
        module_of(array)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if not _has_dtype(array, dtypes):
        raise ArgumentError(
            f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype_name(array)}"
        )
    got = tuple(array.shape)
    fits = len(got) == len(shape) and all(
        want is None or have == want for have, want in zip(got, shape)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ArgumentError(f"{name}: expected shape [{wanted}], got {list(got)}")
    if _is_on_gpu(array) != on_gpu:
        place = ("the CPU", "the GPU")
        raise ArgumentError(
            f"{name}: expected an array on {place[on_gpu]}, where this Buffer works, "
            f"got one on {place[not on_gpu]}"
        )
    if contiguous and not _is_contiguous(array):
        raise ArgumentError(
            f"{name}: expected C-contiguous rows, got strides "
            f"{list(element_strides(array))} for shape {list(got)}; pass "
            "numpy.ascontiguousarray(...) or .contiguous()"
        )
    if on_gpu and contiguous and array.shape[0] and address(array) % 16:
        raise ArgumentError(
            f"{name}: expected an address that is a multiple of 16 on a GPU, got "
            f"{address(array):#x}; pass a copy"
        )
    return array


def _dtype(module: str, name: str) -> Any:
    if module == "torch":
        return getattr(sys.modules["torch"], name)
    if module == "cupy" and name == FLOAT8:
        return np.dtype(np.uint8)
    if name in (BFLOAT16, FLOAT8):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array of `like`'s library and place."""
    module = module_of(like)
    kind = _dtype(module, dtype)
    if module == "torch":
        return sys.modules["torch"].empty(shape, dtype=kind, device=like.device)
    library = np if module == "numpy" else sys.modules["cupy"]
    return library.empty(shape, kind)


def from_host(array: np.ndarray, on_gpu: bool) -> Any:
    """A NumPy array as one that a Buffer on this device takes (CuPy on a GPU)."""
    if not on_gpu:
        return array
    import cupy

    # Bytes travel as integers: CuPy does not know every dtype of ml_dtypes.
    raw = cupy.asarray(array.view(f"u{array.dtype.itemsize}"))
    return raw.view(_dtype("cupy", str(array.dtype)))


def to_host(array: Any, dtype: np.dtype) -> np.ndarray:
    """The NumPy array with the same bits; e4m3 codes become `dtype`."""
    if isinstance(array, np.ndarray):
        return array
    import cupy

    host = cupy.asnumpy(array.view(f"u{array.dtype.itemsize}"))
    is_code = host.dtype.itemsize == dtype.itemsize
    return host.view(dtype if is_code else array.dtype)
