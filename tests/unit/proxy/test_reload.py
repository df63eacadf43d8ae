"""Reading the files again: what is followed, what is refused, and what is left alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from proxy.__main__ import main
from proxy.load import load_settings, reader_of
from proxy.reload import unfollowed
from proxy.settings import InstanceSettings, ProbeSettings, Role, Settings
from tests.fakes.engine import FakeEngine
from tests.unit.proxy.conftest import Stack, StackOf
from tests.unit.proxy.test_admin import admin_of

WATCHED = ProbeSettings(interval_s=60)


def text_of(stack: Stack, **changes: Any) -> str:
    """A settings file that says what the running proxy was told, with some fields changed."""
    fields = msgspec.to_builtins(stack.app.services.settings)
    return msgspec.json.encode({**fields, **changes}).decode()


@asynccontextmanager
async def reloading(stack: Stack, path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with admin_of(stack, lambda: load_settings(["--settings", str(path)])) as admin:
        yield admin


def decode_of(stack: Stack) -> list[InstanceSettings]:
    return [i.settings for i in stack.app.services.fleet.instances(Role.DECODE)]


async def test_instances_come_and_go_as_the_file_says(stack: Stack, tmp_path: Path) -> None:
    extra = await FakeEngine(stack.cluster, "decode").start()
    file = tmp_path / "proxy.json"
    file.write_text(text_of(stack, decode=[{"url": extra.url}]))
    async with reloading(stack, file) as admin:
        done = (await admin.post("/reload")).json()
        assert done == {"added": [extra.url], "changed": [], "removed": [stack.decode[0].url], "needs_restart": []}
        assert (await stack.chat())[0] == 200
    assert len(extra.seen) == 1
    await extra.stop()


@pytest.mark.parametrize("change", [{"side": "127.0.0.1:5"}, {"side": ""}, {"dialect": "nixl"}])
async def test_a_known_instance_with_other_settings_is_replaced(
    stack_of: StackOf, tmp_path: Path, change: dict[str, str]
) -> None:
    async with stack_of(sides=True) as stack:
        file = tmp_path / "proxy.json"
        known = msgspec.to_builtins(decode_of(stack)[0])
        file.write_text(text_of(stack, decode=[{**known, **change}]))
        async with reloading(stack, file) as admin:
            done = (await admin.post("/reload")).json()
            assert (done["added"], done["changed"], done["removed"]) == ([], [known["url"]], [])
            assert msgspec.to_builtins(decode_of(stack)[0]) == {**known, **change}
            assert (await admin.post("/reload")).json()["changed"] == []


async def test_adding_a_known_instance_with_other_settings_replaces_it(stack_of: StackOf) -> None:
    async with stack_of(sides=True) as stack, admin_of(stack) as admin:
        change = {"role": "decode", "url": stack.decode[0].url, "side": "127.0.0.1:5"}
        shown = (await admin.post("/instances", json=change)).json()
        assert (shown["side"], shown["engine"]) == ("127.0.0.1:5", None)
        assert [i.side for i in decode_of(stack)] == ["127.0.0.1:5"]


async def test_what_an_addition_leaves_out_stays_as_it_is_known(stack_of: StackOf) -> None:
    async with stack_of(sides=True) as stack, admin_of(stack) as admin:
        before = decode_of(stack)
        assert before[0].side
        same = {"role": "decode", "url": stack.decode[0].url}
        await admin.post("/instances/drain", json=same)
        assert (await admin.post("/instances", json=same)).json()["draining"] is False
        assert decode_of(stack) == before
        assert (await admin.post("/instances", json={**same, "side": ""})).json()["side"] == ""


@pytest.mark.parametrize("changed", [False, True])
async def test_a_drain_outlives_a_reload(stack_of: StackOf, tmp_path: Path, changed: bool) -> None:
    async with stack_of(decode=2) as stack:
        file = tmp_path / "proxy.json"
        decode = [{"url": e.url, "side": "127.0.0.1:5" if changed else ""} for e in stack.decode]
        file.write_text(text_of(stack, decode=decode))
        async with reloading(stack, file) as admin:
            gone = {"role": "decode", "url": stack.decode[0].url}
            assert (await admin.post("/instances/drain", json=gone)).status_code == 200
            assert len((await admin.post("/reload")).json()["changed"]) == 2 * changed
            states = [i.draining for i in stack.app.services.fleet.instances(Role.DECODE)]
            assert states == [True, False]
            assert (await admin.post("/instances", json=gone)).status_code == 201
            assert not any(i.draining for i in stack.app.services.fleet.instances())


async def test_the_same_place_in_another_spelling_is_the_same_instance(stack_of: StackOf, tmp_path: Path) -> None:
    async with stack_of(probes=WATCHED) as stack:
        file = tmp_path / "proxy.json"
        file.write_text(text_of(stack, decode=[{"url": stack.decode[0].url + "/"}]))
        async with reloading(stack, file) as admin:
            done = (await admin.post("/reload")).json()
            assert (done["added"], done["changed"], done["removed"]) == ([], [], [])
            same = {"role": "decode", "url": stack.decode[0].url.upper().replace("HTTP", "http") + "/"}
            assert (await admin.post("/instances", json=same)).status_code == 201
            assert len(stack.app.services.fleet.instances()) == 2
            assert (await admin.post("/instances/remove", json=same)).status_code == 200
            assert len(stack.app.services.fleet.instances()) == 1


@pytest.mark.parametrize("how", ["reload", "add"])
async def test_who_is_taken_in_is_probed_before_it_gets_work(stack_of: StackOf, tmp_path: Path, how: str) -> None:
    async with stack_of(probes=WATCHED) as stack:
        sick = await FakeEngine(stack.cluster, "decode").start()
        sick.healthy = False
        file = tmp_path / "proxy.json"
        file.write_text(text_of(stack, decode=[{"url": e.url} for e in (*stack.decode, sick)]))
        async with reloading(stack, file) as admin:
            if how == "reload":
                assert (await admin.post("/reload")).json()["added"] == [sick.url]
            else:
                added = await admin.post("/instances", json={"role": "decode", "url": sick.url})
                assert added.json()["available"] is False
        for _ in range(4):
            assert (await stack.chat())[0] == 200
        assert not sick.seen
        await sick.stop()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"host": "127.0.0.2"}, "host"),
        ({"port": 1}, "port"),
        ({"mode": "layerwise", "dialect": "", "metaserver": "http://m:1"}, "mode"),
        ({"dialect": "nixl"}, "dialect"),
        ({"metaserver": "http://m:1"}, "metaserver"),
        ({"secret_file": "/s"}, "secret_file"),
        ({"listener": {"api_key_file": "/k"}}, "listener.api_key_file"),
    ],
)
async def test_a_file_about_another_proxy_is_a_409_and_nothing_is_followed(
    stack: Stack, tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    file = tmp_path / "proxy.json"
    file.write_text(text_of(stack, decode=[{"url": "http://127.0.0.1:9"}], **change))
    before = decode_of(stack)
    async with reloading(stack, file) as admin:
        answer = await admin.post("/reload")
    assert answer.status_code == 409
    assert name in answer.json()["detail"]
    assert "restart" in answer.json()["detail"]
    assert decode_of(stack) == before


async def test_what_takes_a_restart_is_named_and_instances_are_followed(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "proxy.json"
    decode = [{"url": stack.decode[0].url}, {"url": "http://127.0.0.1:9"}]
    file.write_text(text_of(stack, decode=decode, retries=7, policy={"decode": "session"}))
    async with reloading(stack, file) as admin:
        done = (await admin.post("/reload")).json()
    assert done["added"] == ["http://127.0.0.1:9"]
    assert done["needs_restart"] == ["policy.decode", "retries"]


def test_the_modes_own_dialect_may_be_spelled_out() -> None:
    assert unfollowed(Settings(), Settings(dialect="pull")) == unfollowed(Settings(), Settings())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prefill: [",
        "a: b",
        "prefill: []",
        "- 1",
        "decode: 7",
        "prefill: [{url: 'http://h:99999'}]\ndecode: [{url: 'http://h:1'}]",
        "union: [{url: 'http://h:1'}, {url: 'http://h:1/'}]",
        "union: [{url: 'http://h:1', dialect: layerwise}]",
        b"\xff\xfe\x00",
        "[" * 5000,
        None,
    ],
)
async def test_a_file_that_cannot_be_used_is_a_400_and_changes_nothing(
    stack: Stack, tmp_path: Path, text: str | bytes | None
) -> None:
    file = tmp_path / "proxy.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = decode_of(stack)
    async with reloading(stack, file) as admin:
        answer = await admin.post("/reload")
    assert answer.status_code == 400
    assert answer.json()["detail"]
    assert decode_of(stack) == before


@pytest.mark.parametrize("spelling", [("--settings", "FILE"), ("--settings=FILE",), ("--sett", "FILE")])
def test_the_file_is_read_again_however_it_was_named(tmp_path: Path, spelling: tuple[str, ...]) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("union: [{url: 'http://h:1'}]")
    read = reader_of([word.replace("FILE", str(file)) for word in spelling])
    assert read is not None
    file.write_text("union: [{url: 'http://h:2'}]")
    assert read().union[0].url == "http://h:2"


async def test_without_a_file_there_is_nothing_to_read(stack: Stack) -> None:
    assert reader_of(["--union", "http://h:1"]) is None
    async with admin_of(stack) as admin:
        assert (await admin.post("/reload")).status_code == 501


def test_a_file_to_reload_needs_one_to_start_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--reload-spec", "/x.yaml", "--union", "http://h:1"]) == 2
    assert "--spec" in capsys.readouterr().err
