"""When a credential counts as refused."""

import pytest
from aether_common import bus as bus_module
from aether_common.bus import Bus
from nats.errors import Error


async def test_one_refusal_may_be_a_reload_of_the_server_two_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus("ws://127.0.0.1:1", "SU", "_INBOX_w1", "w1")
    refusal = Error("nats: 'Authorization Violation'")
    await bus._error(refusal)
    # nats-py reports one attempt twice.
    await bus._error(refusal)
    assert not bus.refused.is_set()
    monkeypatch.setattr(bus_module, "SAME_ATTEMPT_S", 0)
    await bus._error(Error("nats: permissions violation"))
    assert not bus.refused.is_set()
    await bus._reconnected()
    await bus._error(refusal)
    assert not bus.refused.is_set()
    await bus._error(refusal)
    assert bus.refused.is_set()
