"""Config, slots, size hints and the memory map: numbers that never see a kernel."""

import contextlib
from typing import Any

import numpy as np
import pytest
from world import SMALL_RINGS, Scenario, World, check_round, run

import numba_ep
from numba_ep import device
from numba_ep.bounce import receive_map, row_bytes, send_map
from numba_ep.config import Config, default_config
from numba_ep.slot import slot_bytes


def test_field_order_and_defaults() -> None:
    config = Config(24, 8, 128, 6, 100)
    assert tuple(config) == (24, 8, 128, 6, 100)
    assert (config.num_sms, config.num_channels) == (24, 12)
    assert (config.chunk, config.capacity) == (6, 102)
    assert Config().num_channels == 10
    assert Config(num_max_rdma_chunked_recv_tokens=128).capacity == 132
    assert hash(config) == hash(Config(24, 8, 128, 6, 100))


def test_asking_for_a_config_chooses_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a machine with a GPU, before a Buffer with device="cpu" is made.
    monkeypatch.setattr(device, "_chosen", None)
    monkeypatch.setattr(device, "cuda_is_there", lambda: True)
    monkeypatch.delenv(device.VARIABLE, raising=False)
    config = numba_ep.Buffer.get_dispatch_config(2)
    assert (config.num_sms, config.capacity, config.chunk) == (8, 1024, 128)
    assert device.target() is None


def test_too_few_hardware_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "target", lambda: "cuda")
    for queues, ranks, fits in (
        ("1", 1, False), ("2", 1, True), ("32", 16, True), ("32", 17, False),
        ("", 17, True),
    ):  # fmt: skip
        monkeypatch.setenv(device.QUEUES, queues)
        with contextlib.ExitStack() as stack:
            if not fits:
                text = f"expected at least {2 * ranks}, .* got {queues}"
                stack.enter_context(pytest.raises(ValueError, match=text))
            device.check_queues(ranks)
    monkeypatch.delenv(device.QUEUES)
    with pytest.raises(ValueError, match="got 8;"):
        device.check_queues(5)


@pytest.mark.parametrize(
    ("chunk", "asked", "capacity"),
    [
        (1, 2, 2),
        (3, 7, 9),
        (5, 9, 10),
        (6, 128, 132),
        (20, 128, 140),
        (28, 128, 140),
        (12, 128, 132),
        (16, 256, 256),
    ],
)
def test_c07_capacity_is_a_multiple_of_chunk(
    chunk: int, asked: int, capacity: int
) -> None:
    config = Config(20, 1, 2, chunk, asked)
    assert config.capacity == capacity
    slot = slot_bytes(256, 2, 32)
    assert config.get_rdma_buffer_size_hint(256, 3) == 2 * 3 * 10 * capacity * slot


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ((20, 6, 256, 4, 4), "num_max_rdma_chunked_send_tokens"),
        ((20, 6, 256, 8, 4), "num_max_rdma_chunked_send_tokens"),
        ((20, 6, 256, 0, 4), "num_max_rdma_chunked_send_tokens"),
        ((20, 6, 256, -2, 4), "num_max_rdma_chunked_send_tokens"),
        ((20, 6, 256, 2, 0), "num_max_rdma_chunked_recv_tokens"),
        ((20, 6, 256, 2, -4), "num_max_rdma_chunked_recv_tokens"),
        ((20, 6, 256, 2.0, 4), "num_max_rdma_chunked_send_tokens"),
        ((20, 6, 256, 2, "4"), "num_max_rdma_chunked_recv_tokens"),
        ((20, 6, 256, True, 4), "num_max_rdma_chunked_send_tokens"),
        ((0, 6, 256, 2, 4), "num_sms"),
        ((7, 6, 256, 2, 4), "num_sms"),
        ((-2, 6, 256, 2, 4), "num_sms"),
    ],
)
def test_wrong_fields_are_named(fields: tuple[Any, ...], name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        Config(*fields)


def test_replaced_fields_are_checked() -> None:
    config = Config(20)
    assert config._replace(num_sms=6) == Config(6)
    for fields in ({"num_sms": 3}, {"num_max_rdma_chunked_send_tokens": 999}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            config._replace(**fields)


@pytest.mark.parametrize("num_ranks", range(1, 65))
def test_c11_a_default_for_every_number_of_ranks(num_ranks: int) -> None:
    for num_sms in (2, 20, 48):
        config = default_config(num_ranks, num_sms)
        assert config.num_sms == num_sms
        assert config.capacity % config.chunk == 0
        assert config.chunk <= config.capacity // 2
        hint = config.get_rdma_buffer_size_hint(7168 * 2, num_ranks)
        assert 0 < hint < 1 << 34


def test_c11_defaults_of_nobody() -> None:
    for num_ranks in (0, -1):
        with pytest.raises(ValueError, match="num_ranks"):
            default_config(num_ranks, 20)


def test_slots() -> None:
    """x row | scales | ids | weights, 4 bytes each, padded to 16."""
    assert slot_bytes(14_336, 0, 8) == 14_400
    assert slot_bytes(7168, 56, 8) == 7168 + 224 + 64
    assert slot_bytes(16, 0, 0) == 16
    assert slot_bytes(16, 0, 1) == 32
    assert slot_bytes(128, 1, 0) == 144
    assert slot_bytes(2**40, 2**33, 0) == 2**40 + 2**35


def test_c36_sizes_are_64_bit() -> None:
    config = Config(24, 16, 256, 16, 256)
    assert 2 * config.ring_bytes(32, slot_bytes(14_336, 0, 8)) == 2_831_155_200
    hint = config.get_rdma_buffer_size_hint(14_336, 32, num_topk=8)
    assert hint == 2 * 32 * 12 * 256 * (14_336 + 448 + 64)
    assert config.get_rdma_buffer_size_hint(14_336, 32) > hint
    huge = Config(1000, 1, 2, 1 << 20, 1 << 30)
    assert huge.ring_bytes(4096, 1 << 20) == 4096 * 500 << 50
    receive, send = receive_map(32, 24, 1 << 40), send_map(32, 24, 1 << 40)
    assert receive.num_bytes > 1 << 40 and send.num_bytes > 1 << 40


@pytest.mark.parametrize(
    ("hidden_bytes", "num_ranks", "name"),
    [(0, 2, "hidden_bytes"), (-1, 2, "hidden_bytes"), (2.5, 2, "hidden_bytes"),
     (256, 0, "num_ranks"), (256, -4, "num_ranks")],
)  # fmt: skip
def test_hints_of_nothing(hidden_bytes: Any, num_ranks: int, name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        Config().get_rdma_buffer_size_hint(hidden_bytes, num_ranks)
    assert Config().get_nvl_buffer_size_hint(256, 2) == 0


@pytest.mark.parametrize("hidden", [128, 640, 7168])
@pytest.mark.parametrize("num_topk", [0, 1, 8, 32])
def test_the_hint_covers_every_operation(hidden: int, num_topk: int) -> None:
    """FP8 with scales and bfloat16, top-k or not, from the widest row's bytes."""
    config = Config(4, 3, 7, 3, 7)
    hint = config.get_rdma_buffer_size_hint(2 * hidden, 5)
    for fp8 in (False, True):
        scenario = Scenario((1,) * 5, hidden, num_topk, 40, config, fp8=fp8)
        assert scenario.num_bytes <= hint


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16, 33, 64])
def test_regions_do_not_overlap(num_ranks: int) -> None:
    ring_bytes = 1000
    for regions in (
        receive_map(num_ranks, 24, ring_bytes),
        send_map(num_ranks, 24, ring_bytes),
    ):
        end = 0
        for name, at in regions.offsets.items():
            assert at >= end and at % 128 == 0, name
            end = at + regions.sizes[name]
        assert regions.num_bytes >= end
        # The rings come last: what lies before them has the same place everywhere.
        assert list(regions.offsets)[-1] == "rings"
        assert regions.sizes["rings"] == ring_bytes
        assert str(regions).count("\n") == len(regions.sizes)
    per_row = 8 * (num_ranks + 24 + 4096 // num_ranks)
    assert row_bytes(num_ranks, 24) > per_row


def test_public_names_stay() -> None:
    """A Buffer imports modules of the same names as public functions."""
    scenario = Scenario((3, 4))
    world = World(scenario)
    run(lambda buffer: check_round(buffer, world), 2, scenario.num_bytes)
    for name in numba_ep.__all__:
        assert callable(getattr(numba_ep, name)), name
    assert numba_ep.spawn(lambda group: group.Get_rank(), 2) == [0, 1]


def test_set_num_sms() -> None:
    from numba_ep.buffer import Buffer

    before = vars(Buffer)["num_sms"]
    try:
        Buffer.set_num_sms(12)
        assert Buffer.get_dispatch_config(4).num_sms == 12
        assert Buffer.get_combine_config(40).num_channels == 6
    finally:
        Buffer.num_sms = before
    world = World(Scenario((3, 4), config=SMALL_RINGS))

    def program(buffer: Any) -> None:
        ids = world.inputs[buffer.rank].topk_idx
        layout = buffer.get_dispatch_layout(ids, 8)
        assert [type(part) for part in layout[:4]] == [
            np.ndarray, type(None), np.ndarray, np.ndarray,
        ]  # fmt: skip

    run(program, 2, world.scenario.num_bytes)
