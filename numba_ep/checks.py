"""What dispatch and combine can see of their arguments before a token moves.

Every function raises ArgumentError, ValueError or TypeError with the argument's name.
The caller does not let it out at once: the refusal first goes to all ranks in the row
that opens the operation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba_ep.arrays import (
    BFLOAT16,
    FLOAT8,
    ArgumentError,
    address,
    check,
    element_strides,
)
from numba_ep.config import MAX_EXPERTS, Config
from numba_ep.handle import Handle
from numba_ep.kernels.records import Rows
from numba_ep.slot import SCALE_BYTES, SCALE_GROUP, slot_bytes

ROW_ALIGNMENT = 16
DTYPE_CODES = {BFLOAT16: 1, FLOAT8: 2}
ITEM_BYTES = {BFLOAT16: 2, FLOAT8: 1}


class BufferTooSmall(ArgumentError):
    """num_rdma_bytes does not hold this operation's rings; says how many would."""


class Payload(NamedTuple):
    """Checked rows: arrays as given, and what follows from them."""

    x: Any
    scales: Any
    topk_idx: Any
    topk_weights: Any
    dtype: str

    @property
    def num_tokens(self) -> int:
        """Rows of x."""
        return int(self.x.shape[0])

    @property
    def hidden(self) -> int:
        """Columns of x."""
        return int(self.x.shape[1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x."""
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def num_scales(self) -> int:
        """Scales a row."""
        return 0 if self.scales is None else int(self.scales.shape[1])

    @property
    def num_topk(self) -> int:
        """Experts a token, 0 where no top-k array was given."""
        given = self.topk_weights if self.topk_idx is None else self.topk_idx
        return 0 if given is None else int(given.shape[1])

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token on the wire."""
        return slot_bytes(self.row_bytes, self.num_scales, self.num_topk)

    def rows(self) -> Rows:
        """The same for kernels."""
        strides = (0, 0) if self.scales is None else element_strides(self.scales)
        return Rows(
            x=address(self.x),
            row_bytes=self.row_bytes,
            scales=_address(self.scales),
            num_scales=self.num_scales,
            token_stride=strides[0],
            scale_stride=strides[1],
            topk_idx=_address(self.topk_idx),
            topk_weights=_address(self.topk_weights),
            num_topk=self.num_topk,
        )


def _address(array: Any) -> int:
    # An empty array may have no address, and a kernel takes 0 for "no such array".
    return 0 if array is None else (address(array) or 1)


def _check_row_bytes(name: str, x: Any, dtype: str) -> None:
    hidden = int(x.shape[1])
    if hidden == 0 or hidden * ITEM_BYTES[dtype] % ROW_ALIGNMENT:
        raise ArgumentError(
            f"{name}: expected rows of a positive multiple of {ROW_ALIGNMENT} bytes, "
            f"got hidden {hidden} of {dtype}"
        )


def check_payload(
    x: Any, topk_idx: Any, topk_weights: Any, on_gpu: bool
) -> Payload:  # fmt: skip
    """`x` of a dispatch: [T, H] bfloat16, or (x [T, H] float8_e4m3fn, scales)."""
    scales = None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ArgumentError(f"x: expected (x, scales), got {len(x)} elements")
        x, scales = x
    dtype = BFLOAT16 if scales is None else FLOAT8
    check("x", x, (dtype,), (None, None), on_gpu)
    _check_row_bytes("x", x, dtype)
    num_tokens, hidden = int(x.shape[0]), int(x.shape[1])
    if scales is not None:
        if hidden % SCALE_GROUP:
            raise ArgumentError(
                f"x: expected hidden to be a multiple of {SCALE_GROUP} for FP8, got "
                f"{hidden}"
            )
        shape = (num_tokens, hidden // SCALE_GROUP)
        check("x scales", scales, ("float32",), shape, on_gpu, contiguous=False)
        if any(s % SCALE_BYTES for s in getattr(scales, "strides", ())):
            raise ArgumentError(
                f"x scales: expected strides of whole elements, got {scales.strides} "
                "bytes; pass a copy"
            )
    if topk_idx is not None:
        check("topk_idx", topk_idx, ("int64",), (num_tokens, None), on_gpu)
    if topk_weights is not None:
        if topk_idx is None:
            raise ArgumentError("topk_weights: expected topk_idx with it, got None")
        shape = tuple(topk_idx.shape)
        check("topk_weights", topk_weights, ("float32",), shape, on_gpu)
    return Payload(x, scales, topk_idx, topk_weights, dtype)


def check_experts(num_experts: int, num_ranks: int) -> int:
    """A positive multiple of the ranks, up to MAX_EXPERTS."""
    if num_experts <= 0 or num_experts % num_ranks:
        raise ArgumentError(
            "num_experts: expected a positive multiple of the number of ranks "
            f"({num_ranks}), got {num_experts}"
        )
    if num_experts > MAX_EXPERTS:
        raise ArgumentError(
            f"num_experts: expected at most {MAX_EXPERTS}, got {num_experts}"
        )
    return num_experts


def check_layout(
    tokens_per_rank: Any, is_token_in_rank: Any, tokens_per_expert: Any,
    num_tokens: int, num_ranks: int, on_gpu: bool,
) -> None:  # fmt: skip
    """The three arrays of get_dispatch_layout, all there and of the right shape."""
    for name, array, dtype, shape in (
        ("num_tokens_per_rank", tokens_per_rank, "int32", (num_ranks,)),
        ("is_token_in_rank", is_token_in_rank, "bool", (num_tokens, num_ranks)),
        ("num_tokens_per_expert", tokens_per_expert, "int32", (None,)),
    ):
        if array is None:
            raise ArgumentError(
                f"{name}: expected an array from get_dispatch_layout (or a handle), "
                "got None"
            )
        check(name, array, (dtype,), shape, on_gpu)
    check_experts(int(tokens_per_expert.shape[0]), num_ranks)


def check_handle(handle: Any, owner: object, config: Config) -> Handle:
    """A handle of this Buffer, with the same number of channels."""
    if not isinstance(handle, Handle):
        raise TypeError(
            f"handle: expected what dispatch returned, got {type(handle).__name__}"
        )
    if handle.owner is not owner:
        raise ArgumentError("handle: expected one of this Buffer, got another's")
    if handle.num_channels != config.num_channels:
        raise ArgumentError(
            f"config: expected num_sms {2 * handle.num_channels}, as in the dispatch "
            f"that made the handle, got {config.num_sms}"
        )
    return handle


def check_combine(
    x: Any, handle: Handle, topk_weights: Any, bias: Any, on_gpu: bool
) -> tuple[Payload, tuple[Any, ...]]:
    """Rows as the dispatch delivered them, and 0 to 2 biases for the own tokens."""
    num_tokens = int(handle.is_token_in_rank.shape[0])
    check("x", x, (BFLOAT16,), (handle.num_rows, handle.hidden), on_gpu)
    if topk_weights is not None:
        shape = (handle.num_rows, handle.num_topk or None)
        check("topk_weights", topk_weights, ("float32",), shape, on_gpu)
    if bias is None:
        biases: tuple[Any, ...] = ()
    else:
        biases = tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
    if len(biases) > 2:
        raise ArgumentError(f"bias: expected at most 2 arrays, got {len(biases)}")
    for array in biases:
        check("bias", array, (BFLOAT16,), (num_tokens, handle.hidden), on_gpu)
    return Payload(x, None, None, topk_weights, BFLOAT16), biases


def check_room(config: Config, slot: int, num_ranks: int, half: int) -> None:
    """The rings of `slot`-byte slots must fit into half of num_rdma_bytes."""
    needed = config.ring_bytes(num_ranks, slot)
    if needed > half:
        raise BufferTooSmall(
            f"num_rdma_bytes: expected at least {2 * needed} for {num_ranks} ranks, "
            f"{config.num_channels} channels and rings of {config.capacity} tokens of "
            f"{slot} bytes, got {2 * half}; make the Buffer with "
            "config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks)"
        )


def check_channels(config: Config, max_channels: int) -> None:
    """No more channels than there are queues a rank."""
    if not isinstance(config, Config):
        raise TypeError(f"config: expected a Config, got {type(config).__name__}")
    if config.num_channels > max_channels:
        raise ArgumentError(
            f"num_sms: expected at most {2 * max_channels} (two a channel, and "
            f"num_qps_per_rank is {max_channels}), got {config.num_sms}"
        )
