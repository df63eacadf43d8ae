"""One question to an OpenAI endpoint, as a client asks it, and what the proxy measured of the answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ascend_pd.errors import AscendPdError, OperatorError

ANSWER_S = 180.0
"""The first request also pays for the engines' warm-up."""
RECORD_S = 10.0
MAX_TOKENS = 48


class DemoFailed(AscendPdError):
    """The demo's main job was not done."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client saw."""

    text: str
    prompt_tokens: int
    transfer_id: str
    first_token_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the proxy and the connectors measured. Milliseconds."""

    kv_bytes: int
    prefill_ms: float
    transfer_ms: float
    """What moving the cache added after the prefill; 0 when a layer-wise push was over by then."""


def ask(base_url: str, model: str, question: str, show: Callable[[str], None]) -> Answer:
    """Ask greedily and stream the answer to `show`.

    Raises:
        OperatorError: the client library is missing.
        DemoFailed: an error instead of an answer, or an empty one.
    """
    try:
        from openai import DefaultHttpxClient, OpenAI, OpenAIError
    except ImportError as error:
        raise OperatorError("the openai client is not installed", "pip install openai") from error
    started = time.monotonic()
    first_at = 0.0
    text = ""
    prompt_tokens = 0
    try:
        # trust_env: a site's HTTP_PROXY is for the world outside, not for this machine's loopback.
        http = DefaultHttpxClient(trust_env=False, timeout=ANSWER_S)
        with OpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=http) as client:
            response = client.chat.completions.with_raw_response.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                temperature=0.0,
                max_tokens=MAX_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
            transfer_id = response.headers.get("x-ascend-pd-transfer-id", "")
            for chunk in response.parse():
                piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if piece and not first_at:
                    first_at = time.monotonic()
                text += piece
                show(piece)
                prompt_tokens = chunk.usage.prompt_tokens if chunk.usage else prompt_tokens
    except OpenAIError as error:
        raise DemoFailed(f"the request failed: {error}") from error
    if not text.strip():
        raise DemoFailed("the answer is empty")
    ended = time.monotonic()
    return Answer(text.strip(), prompt_tokens, transfer_id, 1e3 * (first_at - started), 1e3 * (ended - started))


def measured(host: str, port: int, transfer_id: str) -> Measured:
    """What the proxy's record of a transfer says, once the connectors' part is in it.

    Raises:
        DemoFailed: no such record in time, or no KV cache was moved for it.
    """
    deadline = time.monotonic() + RECORD_S
    found: Measured | None = None
    while time.monotonic() < deadline:
        found = _find(_records(host, port, transfer_id), transfer_id)
        if found and found.kv_bytes:
            return found
        time.sleep(0.1)
    if found is None:
        raise DemoFailed(f"the proxy has no record of transfer {transfer_id!r}")
    raise DemoFailed("the answer came, but no KV cache was moved for it: P and D did not work together")


def _records(host: str, port: int, transfer_id: str) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", f"/debug/records?transfer_id={quote(transfer_id)}")
        response = connection.getresponse()
        body = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DemoFailed(f"the proxy does not tell its records: {error}") from error
    finally:
        connection.close()
    if response.status != 200 or not isinstance(body.get("records"), list):
        raise DemoFailed(f"the proxy does not tell its records: HTTP {response.status}")
    records: list[dict[str, Any]] = body["records"]
    return records


def _find(records: list[dict[str, Any]], transfer_id: str) -> Measured | None:
    for record in records:
        if record["transfer_id"] == transfer_id:
            phases = record["phases_ms"]
            return Measured(record["kv_bytes"], phases["p_queue"] + phases["prefill"], phases["transfer"])
    return None
