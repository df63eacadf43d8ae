#!/usr/bin/env python3
"""Our proxy beside vllm-router (P/D mode) in front of the same mock engines, in one run.

    python scripts/bench_proxy.py --router-python PYTHON [--rounds 3]

`PYTHON` is an interpreter that has `vllm-router` installed (it needs orjson and setproctitle as well). Measured:
CPU per request and per relayed chunk (user + system of the whole process, from /proc), requests per second at 32
clients, added time to first byte, resident memory and late chunks with many open streams. Engines and clients are
processes of their own; the two proxies take turns, and each figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httptools
import psutil
import uvloop

ROOT = Path(__file__).resolve().parents[1]
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,"model":"mock",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}],'
    b'"sent":%d}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


# --- the mock engine: answers both roles, as cheaply as it can ---


class Engine(asyncio.Protocol):
    """`max_tokens` chunks, `pace_ms` apart; a request that asks for a remote decode gets a handoff."""

    counts: ClassVar[dict[str, int]] = {"prefills": 0, "decodes": 0, "without handoff": 0}

    def __init__(self) -> None:
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._begin()

    def _begin(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.body = bytearray()
        self.url = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        url, body = self.url, bytes(self.body)
        self.body = bytearray()
        if not body:
            self._json({"object": "list", "data": [{"id": "mock", "object": "model"}], "counts": self.counts})
            return
        request = json.loads(body)
        params = request.get("kv_transfer_params") or {}
        kind = "prefills" if params.get("do_remote_decode") else "decodes" if params else "without handoff"
        self.counts[kind] += 1
        if params.get("do_remote_decode"):
            self._json(answer(url, handoff(params)))
        elif request.get("stream"):
            loop = asyncio.get_running_loop()
            self.transport.write(STREAM_HEAD)
            pace_s = float(request.get("user") or 0) / 1e3
            self._chunk(loop, int(request["max_tokens"]), pace_s, loop.time())
        else:
            self._json(answer(url, None))

    def _chunk(self, loop: asyncio.AbstractEventLoop, left: int, pace_s: float, due: float) -> None:
        if self.transport.is_closing():
            return
        if left == 0:
            self.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE))
            return
        chunk = CHUNK % time.monotonic_ns()
        self.transport.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        due += pace_s
        loop.call_at(due, self._chunk, loop, left - 1, pace_s, due)

    def _json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )


def handoff(params: dict[str, Any]) -> dict[str, Any]:
    """As our pull connector answers, or for a request without transfer id as NixlConnector does."""
    common = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "mock",
        "remote_block_ids": [list(range(8))],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
    }
    if not params.get("transfer_id"):
        return {**common, "tp_size": 1}
    return {
        **common,
        "transfer_id": params["transfer_id"],
        "remote_epoch": "e",
        "remote_block_size": 128,
        "remote_tp_size": 1,
        "num_prompt_tokens": 900,
        "prompt_hash": "0" * 32,
        "lease_seconds": 30.0,
        "wire_version": 1,
    }


def answer(url: bytes, params: dict[str, Any] | None) -> dict[str, Any]:
    chat = url.endswith(b"chat/completions")
    content = {"message": {"role": "assistant", "content": "hello"}} if chat else {"text": "hello"}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, **content, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 900, "completion_tokens": 1, "total_tokens": 901},
        "kv_transfer_params": params,
    }


async def serve_engine(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# --- the load ---


@dataclass
class Stream:
    first_byte_ms: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection that sends one request after another."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, payload: bytes, keep_latencies: bool) -> asyncio.Future[None]:
        self.parser = httptools.HttpResponseParser(self)
        self.stream = Stream()
        self.keep = keep_latencies
        self.tail = b""
        self.sent_at = time.monotonic()
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(payload)
        return self.done

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self.stream.first_byte_ms:
            self.stream.first_byte_ms = 1e3 * (time.monotonic() - self.sent_at)
        if self.keep:
            now = time.monotonic_ns()
            for event in body.split(b"\n\n"):
                at = event.rfind(b'"sent":')
                if at > 0 and event.endswith(b"}"):
                    self.stream.latencies_ms.append((now - int(event[at + 7 : -1])) / 1e6)

    def on_message_complete(self) -> None:
        if self.done is not None and not self.done.done():
            if self.parser.get_status_code() != 200:
                self.done.set_exception(RuntimeError(f"HTTP {self.parser.get_status_code()}"))
            else:
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(RuntimeError("connection lost"))


def payload(port: int, stream: bool, tokens: int, pace_ms: float, extra: dict[str, Any] | None = None) -> bytes:
    body = {
        "model": "mock",
        "messages": [{"role": "user", "content": "word " * 700}],
        "stream": stream,
        "max_tokens": tokens,
        "user": str(pace_ms),
        **(extra or {}),
    }
    raw = json.dumps(body).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    ).encode() + raw


async def load(spec: dict[str, Any]) -> dict[str, Any]:
    """`clients` connections, `each` requests one after another on each."""
    loop = asyncio.get_running_loop()
    port = spec["port"]
    message = payload(port, spec["stream"], spec["tokens"], spec["pace_ms"])
    first: list[float] = []
    latencies: list[float] = []
    failures: list[str] = []

    async def one(number: int) -> None:
        await asyncio.sleep(number * spec.get("ramp_ms", 0) / 1e3)
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        for _ in range(spec["each"]):
            try:
                await client.ask(message, spec["stream"])
            except RuntimeError as error:
                failures.append(str(error))
                break
            first.append(client.stream.first_byte_ms)
            latencies.extend(client.stream.latencies_ms)
        client.transport.abort()

    began = time.monotonic()
    await asyncio.gather(*(one(n) for n in range(spec["clients"])))
    return {
        "seconds": time.monotonic() - began,
        "requests": len(first),
        "first_ms": quantiles(first),
        "latency_ms": quantiles(latencies),
        "chunks": len(latencies),
        "late": sum(1 for value in latencies if value > spec.get("late_ms", 20)),
        "failures": failures[:3],
        "failed": len(failures),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(values)
    return {
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max": ordered[-1],
    }


# --- the run ---


@dataclass
class Proxy:
    name: str
    port: int
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """User + system of the process and its children, threads included."""
        total = 0.0
        parent = psutil.Process(self.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
        return total

    def rss_mib(self) -> float:
        parent = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [parent, *parent.children(recursive=True)]) / 2**20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_http(port: int, path: str, process: subprocess.Popen[bytes], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"process on port {port} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}{path}")


def start(argv: list[str], log: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    out = Path(log).open("wb")  # noqa: SIM115 - lives as long as the child
    return subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True)


def run_load(**spec: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--load", json.dumps(spec)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"load failed: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


Measure = Callable[[Proxy], dict[str, float]]


def measure_requests(proxy: Proxy) -> dict[str, float]:
    run_load(port=proxy.port, stream=False, tokens=1, pace_ms=0, clients=8, each=20)
    before = proxy.cpu_s()
    result = run_load(port=proxy.port, stream=False, tokens=1, pace_ms=0, clients=32, each=60)
    checked(proxy, result)
    return {
        "cpu_us_per_request": 1e6 * (proxy.cpu_s() - before) / result["requests"],
        "requests_per_s": result["requests"] / result["seconds"],
    }


def measure_first_byte(proxy: Proxy) -> dict[str, float]:
    result = checked(proxy, run_load(port=proxy.port, stream=True, tokens=1, pace_ms=0, clients=2, each=200))
    return {"first_byte_p50_ms": result["first_ms"]["p50"], "first_byte_p99_ms": result["first_ms"]["p99"]}


def measure_chunks(proxy: Proxy) -> dict[str, float]:
    """CPU per chunk of streams paced at 20 ms, without the requests' own share."""
    figures = []
    for tokens in (2, 202):
        before = proxy.cpu_s()
        result = checked(
            proxy, run_load(port=proxy.port, stream=True, tokens=tokens, pace_ms=20, clients=48, each=1, ramp_ms=3)
        )
        figures.append((proxy.cpu_s() - before, result))
    chunks = 48 * 200
    return {
        "cpu_us_per_chunk": 1e6 * (figures[1][0] - figures[0][0]) / chunks,
        "chunk_p99_ms": figures[1][1]["latency_ms"]["p99"],
    }


def measure_many(proxy: Proxy, streams: int, pace_ms: int) -> dict[str, float]:
    tokens = int(8000 / pace_ms)
    loading = subprocess.Popen(
        [
            sys.executable,
            __file__,
            "--load",
            json.dumps(
                {
                    "port": proxy.port,
                    "stream": True,
                    "tokens": tokens,
                    "pace_ms": pace_ms,
                    "clients": streams,
                    "each": 1,
                    "ramp_ms": 4,
                    "late_ms": pace_ms,
                }
            ),
        ],
        stdout=subprocess.PIPE,
    )
    time.sleep(0.004 * streams + 3.0)
    rss = proxy.rss_mib()
    output, _ = loading.communicate(timeout=120)
    result = checked(proxy, json.loads(output))
    return {
        "rss_mib_many": rss,
        "late_chunks": float(result["late"]),
        "many_chunks": float(result["chunks"]),
        "many_p99_ms": result["latency_ms"]["p99"],
    }


def checked(proxy: Proxy, result: dict[str, Any]) -> dict[str, Any]:
    if result["failed"]:
        print(f"  {proxy.name}: {result['failed']} requests failed: {result['failures']}", file=sys.stderr)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router-python", help="interpreter with vllm-router; without it only ours is measured")
    parser.add_argument("--router-path", default="", help="PYTHONPATH for that interpreter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--stream-pace-ms", type=int, default=200)
    parser.add_argument("--logs", default="/tmp")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        uvloop.run(serve_engine(args.engine))
        return 0
    if args.load:
        print(json.dumps(uvloop.run(load(json.loads(args.load)))))
        return 0
    return bench(args)


def bench(args: argparse.Namespace) -> int:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        prefill, decode = free_port(), free_port()
        for port in (prefill, decode):
            processes.append(
                start([sys.executable, __file__, "--engine", str(port)], f"{args.logs}/bench-engine-{port}.log")
            )
            wait_http(port, "/health", processes[-1])
        proxies = [start_ours(args, prefill, decode)]
        processes.append(proxies[0].process)
        if args.router_python:
            proxies.append(start_router(args, prefill, decode))
            processes.append(proxies[1].process)
        direct = Proxy("direct", decode, processes[1])
        check_both_legs(proxies, prefill, decode)
        report(args, proxies, measure(args, proxies, direct))
        return 0
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def counts_of(port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
        found: dict[str, int] = json.load(answer)["counts"]
    return found


def check_both_legs(proxies: list[Proxy], prefill: int, decode: int) -> None:
    """What is compared does the same work: one prefill and one decode with its handoff per request."""
    for proxy in proxies:
        before = counts_of(prefill)["prefills"], counts_of(decode)["decodes"]
        run_load(port=proxy.port, stream=True, tokens=2, pace_ms=0, clients=2, each=5)
        after = counts_of(prefill)["prefills"], counts_of(decode)["decodes"]
        if (after[0] - before[0], after[1] - before[1]) != (10, 10):
            raise SystemExit(f"{proxy.name} does not send each request to both engines: {before} -> {after}")


def start_ours(args: argparse.Namespace, prefill: int, decode: int) -> Proxy:
    port = free_port()
    engines = ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = start(
        [sys.executable, "-m", "proxy", "--port", str(port), *engines], f"{args.logs}/bench-ours.log", env
    )
    wait_http(port, "/health", process)
    return Proxy("ascend-pd", port, process)


def start_router(args: argparse.Namespace, prefill: int, decode: int) -> Proxy:
    port = free_port()
    argv = [
        *(args.router_python, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"),
        *("--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"),
        *("--host", "127.0.0.1", "--port", str(port), "--kv-connector", "nixl", "--policy", "round_robin"),
        *("--prometheus-port", str(free_port())),
    ]
    env = {**os.environ, "PYTHONPATH": args.router_path}
    process = start(argv, f"{args.logs}/bench-router.log", env)
    wait_http(port, "/health", process)
    return Proxy("vllm-router", port, process)


def measure(args: argparse.Namespace, proxies: list[Proxy], direct: Proxy) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, list[float]]] = {}
    for number in range(args.rounds):
        order = proxies if number % 2 == 0 else proxies[::-1]
        for proxy in [*order, direct]:
            figures = {**measure_first_byte(proxy), **measure_chunks(proxy)}
            if proxy is not direct:
                figures |= measure_requests(proxy)
            figures |= measure_many(proxy, args.streams, args.stream_pace_ms)
            print(f"round {number + 1} {proxy.name}: " + " ".join(f"{k}={v:.2f}" for k, v in figures.items()))
            for key, value in figures.items():
                rows.setdefault(proxy.name, {}).setdefault(key, []).append(value)
    return {name: {key: statistics.median(values) for key, values in row.items()} for name, row in rows.items()}


FIGURES = (
    ("cpu_us_per_request", "CPU per request, µs (not streamed, 32 clients)"),
    ("cpu_us_per_chunk", "CPU per relayed chunk, µs (48 streams, 20 ms apart)"),
    ("requests_per_s", "requests per second, 32 clients"),
    ("first_byte_p50_ms", "time to first byte, p50, ms"),
    ("first_byte_p99_ms", "time to first byte, p99, ms"),
    ("chunk_p99_ms", "chunk, engine to client, p99, ms"),
    ("rss_mib_many", "resident memory with the many streams open, MiB"),
    ("late_chunks", "late chunks of the many streams"),
    ("many_p99_ms", "chunk of the many streams, p99, ms"),
)


def report(args: argparse.Namespace, proxies: list[Proxy], medians: dict[str, dict[str, float]]) -> None:
    names = [p.name for p in proxies]
    many = f"{args.streams} streams, {args.stream_pace_ms} ms apart"
    print(f"\nMany streams are {many}. Medians of {args.rounds} rounds.\n")
    print("| | direct | " + " | ".join(names) + (" | ratio |" if len(names) > 1 else " |"))
    print("|---|---|" + "---|" * (len(names) + (len(names) > 1)))
    for key, title in FIGURES:
        cells = [f"{medians[n][key]:.2f}" for n in ("direct", *names) if key in medians[n]]
        if key not in medians["direct"]:
            cells.insert(0, "")
        if len(names) > 1:
            base = medians[names[1]][key]
            cells.append(f"{medians[names[0]][key] / base:.2f}" if base else "")
        print(f"| {title} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    raise SystemExit(main())
