"""Where an engine is: one spelling for one place, and nothing that a resolver or a socket stumbles over later."""

from __future__ import annotations

import asyncio

import pytest

from ascend_pd.errors import OperatorError, UnreachableError
from proxy.address import canonical_instance, canonical_side, canonical_url
from proxy.errors import LegFailed
from proxy.load import load_settings, parse_instance
from proxy.settings import InstanceSettings, ProbeSettings, Role, TimeoutSettings
from proxy.sidechannel import SideChannel
from proxy.upstream import Upstream
from tests.unit.proxy.conftest import Stack, StackOf
from tests.unit.proxy.test_admin import admin_of

IMPOSSIBLE_URLS = (
    "http://127.0.0.1:99999",
    "http://127.0.0.1:0",
    "http://127.0.0.1:-1",
    "http://127.0.0.1:x",
    "http://h:\u0663",
    "http://[::1",
    "http://[12345::]:1",
    f"http://{'a' * 64}.example:1",
    f"http://{'a.' * 127}a:1",
    "http://a..b:1",
    "http://a b:1",
    "http://-a:1",
    "http://:1",
    "http://user:word@h:1",
    "http://h:1?x=1",
    "http://h:1#x",
    "http://h:1/v1",
    "ftp://h:1",
    "h:1",
    "",
)
IMPOSSIBLE_SIDES = (
    "127.0.0.1:65536",
    "127.0.0.1:0",
    "127.0.0.1:",
    "127.0.0.1",
    ":1",
    "h:\u0663",
    "::1:5",
    f"{'a' * 64}:1",
    "h:1" + "0" * 5000,
)


@pytest.mark.parametrize(
    ("given", "known_as"),
    [
        ("http://h:1/", "http://h:1"),
        ("HTTP://Host:1", "http://host:1"),
        ("http://h:80", "http://h"),
        ("https://h:443/", "https://h"),
        ("http://h:443", "http://h:443"),
        ("http://[0:0::1]:8000", "http://[::1]:8000"),
        ("http://b\u00fccher.example:1", "http://xn--bcher-kva.example:1"),
        ("http://decode_0.pool-1:8200", "http://decode_0.pool-1:8200"),
    ],
)
def test_one_place_has_one_spelling(given: str, known_as: str) -> None:
    assert canonical_url(given, "URL") == known_as
    assert canonical_url(known_as, "URL") == known_as


@pytest.mark.parametrize(("given", "known_as"), [("H:05", "h:5"), ("[::1]:5", "[::1]:5"), ("10.0.0.1:65535",) * 2])
def test_a_side_channel_has_one_spelling(given: str, known_as: str) -> None:
    assert canonical_side(given, "x") == known_as


@pytest.mark.parametrize("url", IMPOSSIBLE_URLS)
def test_an_impossible_url_is_refused_on_the_command_line(url: str) -> None:
    with pytest.raises(OperatorError):
        load_settings(["--union", url])


@pytest.mark.parametrize("side", IMPOSSIBLE_SIDES)
def test_an_impossible_side_channel_is_refused(side: str) -> None:
    with pytest.raises(OperatorError, match="side channel"):
        canonical_instance(InstanceSettings(url="http://h:1", side=side))


@pytest.mark.parametrize("rank", ["-1", "\u0663", "\u00b2"])
def test_an_impossible_rank_is_refused(rank: str) -> None:
    with pytest.raises(OperatorError):
        canonical_instance(parse_instance(f"http://h:1,dp_rank={rank}"))


def test_one_instance_named_twice_is_refused() -> None:
    with pytest.raises(OperatorError, match="twice"):
        load_settings(["--union", "http://h:1", "--union", "http://H:1/"])
    assert len(load_settings(["--union", "http://h:1,dp_rank=0", "--union", "http://h:1,dp_rank=1"]).union) == 2


async def test_an_impossible_place_through_the_admin_api_is_a_400_and_changes_nothing(stack: Stack) -> None:
    impossible = [{"url": url} for url in IMPOSSIBLE_URLS]
    impossible += [{"url": stack.decode[0].url, "side": side} for side in IMPOSSIBLE_SIDES]
    before = [i.settings for i in stack.app.services.fleet.instances()]
    async with admin_of(stack) as admin:
        for place in impossible:
            for path in ("/instances", "/instances/drain", "/instances/remove"):
                answer = await admin.post(path, json={"role": "decode", **place})
                assert answer.status_code == 400, (path, place)
                assert answer.json()["detail"]
    assert [i.settings for i in stack.app.services.fleet.instances()] == before


async def test_a_layerwise_instance_needs_a_metaserver(stack: Stack) -> None:
    change = {"role": "decode", "url": "http://127.0.0.1:9", "dialect": "layerwise"}
    async with admin_of(stack) as admin:
        answer = await admin.post("/instances", json=change)
    assert answer.status_code == 400
    assert "metaserver" in answer.json()["detail"]


@pytest.mark.parametrize("body", [b"\xff", b'{"role":"decode","url":"\xff"}', b"[" * 100_000, b""])
async def test_a_body_that_is_no_json_is_a_400_of_the_admin_api(stack: Stack, body: bytes) -> None:
    async with admin_of(stack) as admin:
        assert (await admin.post("/instances", content=body)).status_code == 400


@pytest.mark.parametrize("url", [u for u in IMPOSSIBLE_URLS if u.startswith("http")])
async def test_a_connection_to_an_impossible_place_is_a_failed_leg(url: str) -> None:
    """Should one come in another way."""
    upstream = Upstream(TimeoutSettings(connect_s=0.5))
    try:
        for base in (url, url):  # what is remembered of the first must not change the second
            with pytest.raises((LegFailed, ValueError)) as caught:
                await upstream.get(base, "/health", "decode", 1.0)
            assert isinstance(caught.value, LegFailed)
    finally:
        await upstream.close()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "nonsense", ""])
async def test_a_side_channel_at_an_impossible_place_is_unreachable(address: str) -> None:
    channel = SideChannel(b"")
    try:
        with pytest.raises(UnreachableError):
            await channel.hello(address, 0.1)
    finally:
        await channel.close()


async def test_whatever_breaks_one_probe_the_other_instances_are_watched_on(
    stack_of: StackOf, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack_of(decode=2, probes=ProbeSettings(interval_s=0.05, failures=1)) as stack:
        fleet = stack.app.services.fleet
        broken = fleet.add(InstanceSettings(url="http://127.0.0.1:9"), Role.DECODE)
        broken.settings = None  # nothing sane can be done with it
        async with asyncio.timeout(5):
            while broken.healthy:
                await asyncio.sleep(0.02)
            assert "the probe of http://127.0.0.1:9 broke" in caplog.text
            for healthy in (False, True):
                stack.decode[0].healthy = healthy
                while fleet.instances(Role.DECODE)[0].healthy is not healthy:
                    await asyncio.sleep(0.02)
        for _ in range(4):
            assert (await stack.chat())[0] == 200
