"""Requests for the chaos suite: what was asked, what came back and when, and clients that leave early."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_TOKENS = 8
Prompt = tuple[int, ...]


def prompt_of(length: int, seed: int) -> Prompt:
    """Random ordinary tokens of SmolLM2 (no special ones)."""
    return tuple(random.Random(seed).choices(range(20, 49_000), k=length))


@dataclass(frozen=True)
class Outcome:
    """One request's end: the tokens, or a refusal with its reason, or a cut connection."""

    prompt: Prompt
    seconds: float
    tokens: tuple[int, ...] = ()
    status: int = 0
    error: str = ""
    cut: bool = False

    @property
    def answered(self) -> bool:
        return self.status == 200 and not self.error


def ask(
    url: str,
    prompt: Prompt,
    *,
    params: dict[str, Any] | None = None,
    max_tokens: int = MAX_TOKENS,
    timeout_s: float = 120.0,
    cache_salt: str = "",
) -> Outcome:
    """One greedy completion, to its end. A refused or broken connection is an outcome, not an exception.

    With a `cache_salt` of its own it shares no block of the engine's prefix cache.
    """
    body: dict[str, Any] = {"model": "smollm2", "prompt": list(prompt), "max_tokens": max_tokens}
    body |= {"temperature": 0, "return_token_ids": True}
    if params is not None:
        body["kv_transfer_params"] = params
    if cache_salt:
        body["cache_salt"] = cache_salt
    started = time.monotonic()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        document = json.loads(answer.read())
        seconds = time.monotonic() - started
        if answer.status != 200:
            return Outcome(prompt, seconds, status=answer.status, error=_reason(document))
        return Outcome(prompt, seconds, tuple(document["choices"][0]["token_ids"]), status=200)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Outcome(prompt, time.monotonic() - started, error=f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def handoff_of(url: str, prompt: Prompt, params: dict[str, Any]) -> dict[str, Any]:
    """What P answers a pull request with."""
    body = {"model": "smollm2", "prompt": list(prompt), "max_tokens": 1, "kv_transfer_params": params}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        found: dict[str, Any] = json.loads(connection.getresponse().read())["kv_transfer_params"]
        return found
    finally:
        connection.close()


def ask_and_leave(url: str, prompt: Prompt, after_s: float, *, stream: bool) -> Outcome:
    """Send a request and cut the connection after `after_s`, whatever has come by then."""
    body = {"model": "smollm2", "prompt": list(prompt), "max_tokens": 64, "temperature": 0, "stream": stream}
    payload = json.dumps(body | {"ignore_eos": True}).encode()
    where = urlsplit(url)
    started = time.monotonic()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection((where.hostname or "", where.port or 80), timeout=30) as client:
        client.sendall(head.encode() + payload)
        while (left := started + after_s - time.monotonic()) > 0:
            client.settimeout(left)
            try:
                if not client.recv(65536):
                    break
            except TimeoutError:
                break
    return Outcome(prompt, time.monotonic() - started, cut=True)


def _reason(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(document)


class Load:
    """Requests under way in the background, `at_a_time` of them."""

    def __init__(self, url: str, prompts: Sequence[Prompt], at_a_time: int = 4) -> None:
        self._pool = ThreadPoolExecutor(at_a_time)
        self._begun = threading.Event()
        self._futures: list[Future[Outcome]] = [self._pool.submit(self._one, url, prompt) for prompt in prompts]
        self._begun.wait(30)

    def _one(self, url: str, prompt: Prompt) -> Outcome:
        self._begun.set()
        return ask(url, prompt)

    def outcomes(self, timeout_s: float = 240.0) -> list[Outcome]:
        """All ends; a request without one by then is the failure that this suite looks for."""
        deadline = time.monotonic() + timeout_s
        found = [future.result(max(0.1, deadline - time.monotonic())) for future in self._futures]
        self._pool.shutdown()
        return found
