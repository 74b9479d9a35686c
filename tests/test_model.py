"""The model of the protocol holds, and would not without the protocol's rules."""

from __future__ import annotations

import pytest
from conftest import require
from model import check


@pytest.fixture(autouse=True, scope="module")
def tools() -> None:
    reason = check.missing_tool()
    require(reason is None, reason or "")


@pytest.mark.parametrize("name", check.SOUND)
def test_every_order_of_events_ends_well(name: str) -> None:
    assert check.check(check.SOUND[name]).found == check.NOTHING


@pytest.mark.parametrize("name", check.VARIANTS)
def test_a_dropped_rule_is_noticed(name: str) -> None:
    run, expected = check.variant(name)
    assert check.check(run).found == expected
