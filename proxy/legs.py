"""The bodies of the two legs, each built fresh; the client's own body is never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.request import CHAT, ClientRequest

_DROPPED_ON_PREFILL = frozenset(
    # what only shapes the answer, and would cost or be refused with one token and no stream
    (
        "stream_options",
        "min_tokens",
        "best_of",
        "logprobs",
        "top_logprobs",
        "echo",
        "suffix",
        "continuous_usage_stats",
    )
)


def prefill_body(request: ClientRequest, params: dict[str, Any], fields: Mapping[str, Any]) -> bytes:
    """P's body: the same prompt, one token, not streamed. `fields` are the dialect's and go in as they are."""
    body = {key: value for key, value in request.body.items() if key not in _DROPPED_ON_PREFILL}
    body["stream"] = False
    body["max_tokens"] = 1
    if request.path == CHAT:
        body["max_completion_tokens"] = 1
    if "n" in body:
        body["n"] = 1
    body.update(fields)
    body["kv_transfer_params"] = params
    return msgspec.json.encode(body)


def decode_body(request: ClientRequest, params: dict[str, Any], token_ids: list[int] | None = None) -> bytes:
    """D's body: the client's own bytes with the handoff appended as one more member.

    With P's `token_ids` D need not render and tokenise again: vLLM takes them from the handoff of a chat request,
    and as the prompt of a completion (unless that is to be echoed as text).
    """
    raw = request.raw
    if token_ids and request.path == CHAT:
        params = {**params, "prompt_token_ids": token_ids}
    elif token_ids and isinstance(request.body.get("prompt"), str) and not request.body.get("echo"):
        raw = msgspec.json.encode({**request.body, "prompt": token_ids})
    head = raw.rstrip()[:-1].rstrip()
    separator = b"" if head.endswith(b"{") else b","
    return head + separator + b'"kv_transfer_params":' + msgspec.json.encode(params) + b"}"
