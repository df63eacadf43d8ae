"""Coroutines run by hand end like those run by tasks."""

from __future__ import annotations

import asyncio

import pytest

from proxy.stepped import Stepped


def ignore(_: Stepped) -> None:
    pass


async def test_what_never_waits_is_done_at_once() -> None:
    async def work() -> int:
        return 7

    stepped = Stepped(work(), ignore)
    assert (stepped.done, stepped.result, stepped.error) == (True, 7, None)


async def test_what_waits_goes_on_from_callbacks_and_tells_when_it_is_done() -> None:
    event = asyncio.Event()
    ended: list[object] = []

    async def work() -> str:
        await event.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return "x"

    stepped = Stepped(work(), lambda s: ended.append(s.result))
    assert not stepped.done
    event.set()
    async with asyncio.timeout(2):
        while not ended:
            await asyncio.sleep(0.01)
    assert ended == ["x"]


@pytest.mark.parametrize("waits", [False, True])
async def test_an_error_is_kept_for_whoever_waits(waits: bool) -> None:
    async def work() -> None:
        if waits:
            await asyncio.sleep(0)
        raise ConnectionError("gone")

    stepped = Stepped(work(), ignore)
    await asyncio.sleep(0.01)
    assert stepped.done
    assert isinstance(stepped.error, ConnectionError)


async def test_a_closed_one_never_goes_on() -> None:
    event = asyncio.Event()
    seen: list[str] = []

    async def work() -> None:
        try:
            await event.wait()
            seen.append("went on")
        finally:
            seen.append("closed")

    stepped = Stepped(work(), lambda _: seen.append("told"))
    stepped.close()
    event.set()
    await asyncio.sleep(0.01)
    assert seen == ["closed"]
