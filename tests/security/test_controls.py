"""The attempts can succeed: each part of the defence once taken away, and the attempts notice."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aether_coordinator import fleet, loopback, replies, requests
from security.attempts import all_attempts
from security.trying import breaches
from security.world import World, world

EVERYTHING = '{service: "$JS.API.>", response_type: stream, accounts: [WORKERS]}'


async def noticed(target: World, group: str, part: str = "") -> list[str]:
    """What is wrong with the attempts of a group whose text contains `part`, until the run is beyond repair."""
    attempts = [one for one in all_attempts(target) if one.group == group and part in one.what]
    assert attempts
    return [f"{attempt.what}: {line}" async for attempt, _, wrong in breaches(target, attempts) for line in wrong]


def allow(what: str, subject: str) -> Callable[[str], str]:
    """Let every worker publish, or subscribe to, one more subject."""
    return lambda text: text.replace(f"{what}: {{ allow: [ ", f'{what}: {{ allow: [ "{subject}", ')


def any_acknowledgement(text: str) -> str:
    return re.sub(r'"(\$JS\.ACK\.[^.]*)\.w-w1\.>"', r'"\1.>"', text)


def whole_interface(text: str) -> str:
    """JetStream's interface for the workers' account."""
    text = text.replace("exports: [", f"exports: [ {EVERYTHING}", 1)
    return text.replace("imports: [", 'imports: [ {service: {account: CORE, subject: "$JS.API.>"}}', 1)


def literal_purge(text: str) -> str:
    """Less than the whole interface, and worse: an import without a wildcard can be reached by an answer."""
    text = text.replace("exports: [", f"exports: [ {EVERYTHING}", 1)
    purge = '{service: {account: CORE, subject: "$JS.API.STREAM.PURGE.AETHER_test_JOBS"}}'
    return text.replace("imports: [", f"imports: [ {purge}", 1)


def literal_imports(text: str) -> str:
    """Imports that write, without a wildcard: nats-server lets answers through to them."""
    for subject, literal, wild in (
        ("aether.test.replies.*.*", "aether.test.replies.w2.forged", "aether.test.replies.w1.*"),
        ("aether.test.fleet.hb.*", "aether.test.fleet.hb.w2", "aether.test.fleet.hb.w1"),
    ):
        both = f'{{service: {{account: CORE, subject: "{literal}"}}}}\n {{service: {{account: CORE, subject: "{wild}"}}'
        text = text.replace(f'{{service: {{account: CORE, subject: "{subject}"}}', both)
    return text


def one_account(text: str) -> str:
    """Workers in the account that has JetStream, with the same permissions and names."""
    coordinator = re.search(r"users: \[ (\{ nkey: .*?\}) \]", text)
    assert coordinator
    mappings = re.findall(r'account: CORE, subject: "([^"]*)"\}, to: "([^"]*)"', text)
    lines = [f'"{name}": "{subject.replace("*", "{{wildcard(1)}}")}"' for subject, name in mappings]
    text = text.replace(coordinator[0], f'include "workers.conf"\n    mappings {{ {chr(10).join(lines)} }}')
    head, _, tail = text.rpartition('include "workers.conf"')
    return head + tail


@pytest.mark.parametrize(
    ("group", "part", "expected", "loosened"),
    [
        ("publish", "a reply under another's name", "stream.replies", {"workers": allow("publish", ">")}),
        ("publish", "a heartbeat under another", "counters.messages_bad", {
            "workers": allow("publish", "aether.test.fleet.>")}),
        ("JetStream", "delete", "ACCEPTED", {"workers": allow("publish", ">"), "configuration": whole_interface}),
        ("subscribe", "", "ACCEPTED", {"workers": allow("subscribe", ">")}),
        ("acknowledge", "exact subject", "consumer.jobs.w-w2", {"workers": any_acknowledgement}),
        ("acknowledge", "130 guesses", "consumer.jobs.w-w2", {"workers": any_acknowledgement}),
        ("through a reply subject", "purge the jobs", "stream.jobs", {"configuration": literal_purge}),
        ("through a reply subject", "a reply of another", "counters.", {"configuration": literal_imports}),
        ("through a reply subject", "a heartbeat of another", "counters.", {"configuration": literal_imports}),
        ("keys", "a worker's key at", "ACCEPTED", {
            "workers": lambda text: text.replace('"WEBSOCKET"', '"WEBSOCKET", "STANDARD"')}),
        ("keys", "the coordinator's key over", "ACCEPTED", {
            "configuration": lambda text: text.replace('"STANDARD"', '"STANDARD", "WEBSOCKET"')}),
        ("exhaust", "subscriptions", "ACCEPTED", {
            "configuration": lambda text: re.sub(r"max_subscriptions: \d+", "max_subscriptions: 1000", text)}),
        ("reply", "larger than", "ACCEPTED", {
            "configuration": lambda text: text.replace("max_payload: 4MB", "max_payload: 8MB")}),
    ],
)  # fmt: skip
async def test_a_loose_configuration_is_noticed(
    tmp_path: Path, group: str, part: str, expected: str, loosened: dict[str, Callable[[str], str]]
) -> None:
    async with world(tmp_path, **loosened) as target:
        found = await noticed(target, group, part)
    assert any(expected in line for line in found), found


async def test_one_account_for_all_is_noticed(tmp_path: Path) -> None:
    coordinator: list[str] = []

    def configuration(text: str) -> str:
        coordinator.extend(re.findall(r"users: \[ (\{ nkey: .*?\}) \]", text))
        return one_account(text)

    def users(text: str) -> str:
        # What is mapped needs the permission for what it is mapped to.
        text = re.sub(r'"aether\.test\.next\.(.*?)"', r'\g<0>, "$JS.API.CONSUMER.MSG.NEXT.AETHER_test_JOBS.\1"', text)
        get = "$JS.API.DIRECT.GET.OBJ_aether-test-artifacts"
        text = text.replace('"aether.test.art.get"', f'"aether.test.art.get", "{get}", "{get}.>"')
        return text.replace("users: [", f"users: [ {coordinator[0]}", 1)

    async with world(tmp_path, configuration=configuration, workers=users) as target:
        found = await noticed(target, "through a reply subject", "purge the jobs")
        found += await noticed(target, "through a reply subject", "a job on another")
    assert any("stream.jobs.state" in line for line in found), found


@pytest.mark.parametrize(
    ("group", "part", "module", "name", "lenient"),
    [
        ("reply", "of a later dispatch", replies, "is_of", lambda *_: True),
        ("reply", "with another adapter", replies, "check_reply", lambda *_: ""),
        ("reply", "with another seed", replies, "check_reply", lambda *_: ""),
        ("fleet", "a window of a billion", fleet, "MAX_WINDOW", 1 << 40),
        ("fleet", "a megabyte", requests, "MAX_REQUEST", 1 << 40),
        ("gateway", "a guessed secret", loopback, "has_secret", lambda *_: True),
        ("gateway", "from another host name", loopback, "host_name", lambda _: "localhost"),
    ],
)
async def test_a_lenient_coordinator_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, part: str, module: Any, name: str, lenient: Any
) -> None:
    monkeypatch.setattr(module, name, lenient)
    async with world(tmp_path) as target:
        found = await noticed(target, group, part)
    assert found
