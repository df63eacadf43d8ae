#!/usr/bin/env python3
"""Which HTTP client relays token streams at the least CPU: aiohttp, httpx and the proxy's own over httptools.

    python scripts/bench_http_client.py [--rounds 3]

The same process asks a mock engine (a process of its own) with each client in turn: whole answers one after another,
and streams of 500 chunks that come 1 ms apart, 16 at a time. CPU is this process's user + system time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import httpx
import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import bench_proxy  # noqa: E402

from proxy.settings import TimeoutSettings  # noqa: E402
from proxy.upstream import Upstream  # noqa: E402

PATH = "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}
CHUNKS, STREAMS, REQUESTS = 500, 16, 1500
Ask = Callable[[bytes], Awaitable[int]]
"""Sends a body, takes the answer piece by piece, returns its bytes."""


def body(stream: bool) -> bytes:
    content = {"model": "mock", "messages": [{"role": "user", "content": "word " * 700}], "user": "1"}
    return json.dumps({**content, "stream": stream, "max_tokens": CHUNKS}).encode()


async def measure(ask: Ask) -> tuple[float, float]:
    """(CPU µs per whole answer, CPU µs per chunk)."""
    for _ in range(50):
        await ask(body(False))
    before = time.process_time()
    for _ in range(REQUESTS):
        await ask(body(False))
    per_request = 1e6 * (time.process_time() - before) / REQUESTS
    before = time.process_time()
    sizes = await asyncio.gather(*(ask(body(True)) for _ in range(STREAMS)))
    per_chunk = 1e6 * (time.process_time() - before) / (STREAMS * CHUNKS)
    if len(set(sizes)) > 2:
        raise SystemExit(f"streams of different length: {sizes}")
    return per_request, per_chunk


async def with_aiohttp(url: str) -> tuple[float, float]:
    async with aiohttp.ClientSession() as session:

        async def ask(content: bytes) -> int:
            size = 0
            async with session.post(url + PATH, data=content, headers=HEADERS) as answer:
                async for piece in answer.content.iter_any():
                    size += len(piece)
            return size

        return await measure(ask)


async def with_httpx(url: str) -> tuple[float, float]:
    async with httpx.AsyncClient(timeout=60) as client:

        async def ask(content: bytes) -> int:
            size = 0
            async with client.stream("POST", url + PATH, content=content, headers=HEADERS) as answer:
                async for piece in answer.aiter_raw():
                    size += len(piece)
            return size

        return await measure(ask)


async def with_ours(url: str) -> tuple[float, float]:
    upstream = Upstream(TimeoutSettings())

    async def ask(content: bytes) -> int:
        answer = await upstream.post(url, PATH, content, HEADERS, "engine", 60)
        pieces: list[int] = []
        await answer.pipe(lambda piece: pieces.append(len(piece)), 60)
        return sum(pieces)

    try:
        return await measure(ask)
    finally:
        await upstream.close()


CLIENTS = {"own, over httptools": with_ours, "aiohttp": with_aiohttp, "httpx": with_httpx}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    port = bench_proxy.free_port()
    script = str(ROOT / "scripts" / "bench_proxy.py")
    engine = bench_proxy.start([sys.executable, script, "--engine", str(port)], "/dev/null")
    try:
        bench_proxy.wait_http(port, "/health", engine)
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in CLIENTS}
        for _ in range(args.rounds):
            for name, client in CLIENTS.items():
                figures[name].append(uvloop.run(client(f"http://127.0.0.1:{port}")))
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.wait(10)
    print("| client | CPU per request, µs | CPU per chunk, µs |\n|---|---|---|")
    for name, rounds in figures.items():
        requests, chunks = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {requests:.0f} | {chunks:.1f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
