"""/ready says what would become of a request: it is judged by the rule that requests are routed by."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from proxy.settings import PolicySettings, Role
from tests.unit.proxy.conftest import Stack, StackOf, chat_body

ROOT = Path(__file__).resolve().parents[3]
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "u": Role.UNION}


async def ready(stack: Stack) -> bool:
    async with stack.http.get(stack.url + "/ready") as answer:
        assert await answer.json() == {"ready": answer.status == 200}
        return answer.status == 200


@pytest.mark.parametrize("fallback", ["local", "union", "none"])
@pytest.mark.parametrize("cluster", ["pd", "pdu", "u", "d", "du"])
async def test_ready_and_routing_agree_whoever_is_down(stack_of: StackOf, cluster: str, fallback: str) -> None:
    counts = {"prefill": cluster.count("p"), "decode": cluster.count("d"), "union": cluster.count("u")}
    async with stack_of(**counts, policy=PolicySettings(fallback=fallback), retries=0) as stack:
        fleet = stack.app.services.fleet
        served = 0
        for bits in range(2 ** len(cluster)):
            for place, letter in enumerate(cluster):
                fleet.instances(ROLES[letter])[0].healthy = bool(bits >> place & 1)
            status, _ = await stack.chat()
            assert await ready(stack) == (status == 200), (bits, status)
            served += status == 200
        assert served > 0 or cluster == "d"


@pytest.mark.parametrize("union", [0, 1])
async def test_ready_and_routing_agree_when_engines_do_not_fit(stack_of: StackOf, union: int) -> None:
    async with stack_of(decode=2, union=union, sides=True) as stack:
        await stack.app.services.probes.probe_all()
        decoders = stack.app.services.fleet.instances(Role.DECODE)
        for number, instance in enumerate(decoders):
            assert (await stack.chat())[0] == 200
            assert await ready(stack)
            identity = instance.identity
            assert identity is not None
            other = msgspec.structs.replace(identity.fingerprint, architecture=f"Other{number}")
            engine = msgspec.structs.replace(identity.engine, epoch=f"other{number}")
            instance.identity = msgspec.structs.replace(identity, fingerprint=other, engine=engine)
        assert (await stack.chat())[0] == 503
        assert not await ready(stack)


async def test_ready_and_routing_agree_when_dialects_do_not_meet(stack_of: StackOf) -> None:
    for fallback, served in (("local", True), ("none", False)):
        async with stack_of(policy=PolicySettings(fallback=fallback)) as stack:
            stack.app.services.fleet.instances(Role.DECODE)[0].dialect = "nixl"
            assert ((await stack.chat())[0] == 200) is served
            assert await ready(stack) is served


async def test_while_draining_it_is_not_ready_and_connections_are_ended(stack_of: StackOf) -> None:
    async with stack_of(union=1) as stack:
        stack.app.services.admission.draining = True
        assert not await ready(stack)
        for method, path in (
            ("GET", "/ready"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/responses"),
            ("POST", "/tokenize"),
            ("POST", "/v1/embeddings"),
        ):
            body = chat_body() if method == "POST" else None
            async with stack.http.request(method, stack.url + path, json=body) as answer:
                assert answer.status == 503, path
                assert answer.headers["connection"] == "close", path
                assert method == "GET" or int(answer.headers["retry-after"]) >= 1, path


def answer_of(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers.get("retry-after", ""), answer.headers.get("connection", "")
    finally:
        connection.close()


async def test_a_lame_duck_listens_and_says_that_it_leaves_until_the_second_signal() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--port", str(port), "--union", "http://127.0.0.1:9", "--set", "timeouts.lame_duck_s=600"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *arguments), cwd=ROOT, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while b"startup complete" not in await process.stderr.readline():
                pass
            process.send_signal(signal.SIGTERM)
            while b"draining" not in await process.stderr.readline():
                pass
            body = msgspec.json.encode(chat_body())
            assert await asyncio.to_thread(answer_of, port, "GET", "/ready") == (503, "", "close")
            status, after, connection = await asyncio.to_thread(
                answer_of, port, "POST", "/v1/chat/completions", body
            )
            assert (status, connection) == (503, "close")
            assert int(after) >= 1
            process.send_signal(signal.SIGTERM)
            await process.stderr.read()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_lame_duck_leaves_by_itself() -> None:
    arguments = ["--port", "0", "--union", "http://127.0.0.1:9", "--set", "timeouts.lame_duck_s=0.2"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *arguments), cwd=ROOT, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while b"startup complete" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        await process.stderr.read()
        assert await process.wait() == 0
