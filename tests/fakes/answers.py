"""What vLLM answers, whole and as server-sent events, in the formats of all its token-carrying endpoints."""

from __future__ import annotations

import hashlib
import json
from typing import Any

WORDS = ("Paris", " is", " the", " capital", " of", " France", ".", " It", " lies", " on", " the", " Seine", "!")
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ERROR_TEXT = "EngineCore request failed"
ERROR_EVENT = (
    b'data: {"error": {"message": "EngineCore request failed", "type": "InternalServerError", '
    b'"param": null, "code": 500}}\n\n'
)


def prompt_of(body: dict[str, Any]) -> str:
    """One text that stands for the prompt."""
    return json.dumps(body.get("messages", body.get("input", body.get("prompt"))))


def words_of(body: dict[str, Any]) -> list[str]:
    """The answer's tokens: they depend on the prompt and the limit alone."""
    limits = (body.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    limit = next(filter(None, limits), len(WORDS))
    shift = hashlib.sha256(prompt_of(body).encode()).digest()[0] % len(WORDS)
    return [WORDS[(shift + i) % len(WORDS)] for i in range(min(limit, 200))]


def usage_of(body: dict[str, Any]) -> dict[str, int]:
    """As vLLM counts, with one token per character of prompt."""
    prompt, answer = len(prompt_of(body)), len(words_of(body))
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def whole_answer(path: str, body: dict[str, Any], model: str) -> dict[str, Any]:
    """A non-streamed answer."""
    if path == RESPONSES:
        return _response(body, model, "completed")
    if path == MESSAGES:
        return _message(body, model, [{"type": "text", "text": "".join(words_of(body))}], "max_tokens")
    text = "".join(words_of(body))
    if path.endswith("chat/completions"):
        choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": text}}
        kind, name = "chat.completion", "chatcmpl-fake"
    else:
        choice = {"index": 0, "text": text}
        kind, name = "text_completion", "cmpl-fake"
    choice |= {"finish_reason": "length", "logprobs": None}
    return {
        "id": name,
        "object": kind,
        "created": 1,
        "model": model,
        "choices": [choice],
        "usage": usage_of(body),
        "kv_transfer_params": None,
    }


def stream_events(path: str, body: dict[str, Any], model: str) -> list[bytes]:
    """A streamed answer, one event per token; usage and [DONE] at the end, but for the formats that name events."""
    if path in (RESPONSES, MESSAGES):
        events_of = response_events if path == RESPONSES else message_events
        return [_named(event["type"], event) for event in events_of(body, model)]
    chat = path.endswith("chat/completions")
    words = words_of(body)
    events = []
    for i, word in enumerate(words):
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if i == len(words) - 1 else None}
        choice |= {"delta": {"content": word}} if chat else {"text": word}
        events.append(_chunk(chat, model, [choice]))
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(_chunk(chat, model, [], usage_of(body)))
    return [*events, b"data: [DONE]\n\n"]


def _chunk(chat: bool, model: str, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
    chunk: dict[str, Any] = {
        "id": "chatcmpl-fake" if chat else "cmpl-fake",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1,
        "model": model,
        "choices": choices,
    }
    if usage:
        chunk["usage"] = usage
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def error_event(path: str) -> bytes:
    """An error in a stream, and what follows it: vLLM 0.32 sends [DONE] where it always does."""
    if path == RESPONSES:
        return _named("error", {"type": "error", "code": "x", "message": ERROR_TEXT, "sequence_number": 9})
    if path == MESSAGES:
        return _named("error", {"type": "error", "error": {"type": "internal_error", "message": ERROR_TEXT}})
    return ERROR_EVENT + b"data: [DONE]\n\n"


def _named(name: str, event: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json.dumps(event).encode() + b"\n\n"


def response_events(body: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """The events of `/v1/responses`, which end with `response.completed`."""
    item = {"type": "message", "id": "msg", "role": "assistant", "status": "in_progress", "content": []}
    at = {"item_id": "msg", "output_index": 0, "content_index": 0}
    words = words_of(body)
    part = {"type": "output_text", "text": "".join(words), "annotations": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response(body, model, "in_progress")},
        {"type": "response.in_progress", "response": _response(body, model, "in_progress")},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        *({"type": "response.output_text.delta", **at, "delta": word, "logprobs": []} for word in words),
        {"type": "response.output_text.done", **at, "text": "".join(words), "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": {**item, "content": [part]}},
        {"type": "response.completed", "response": _response(body, model, "completed")},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _response(body: dict[str, Any], model: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": "".join(words_of(body)), "annotations": []}
    item = {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": [part]}
    usage = usage_of(body)
    whole = status == "completed"
    return {
        "id": "resp_fake",
        "object": "response",
        "created_at": 1,
        "model": model,
        "status": status,
        "output": [item] if whole else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if whole
        else None,
    }


def message_events(body: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """The events of `/v1/messages`, which end with `message_stop`."""
    text = {"type": "content_block_delta", "index": 0}
    return [
        {"type": "message_start", "message": _message(body, model, [], None)},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({**text, "delta": {"type": "text_delta", "text": word}} for word in words_of(body)),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": {"input_tokens": 1, "output_tokens": len(words_of(body))},
        },
        {"type": "message_stop"},
    ]


def _message(body: dict[str, Any], model: str, content: list[Any], stop_reason: str | None) -> dict[str, Any]:
    usage = usage_of(body)
    return {
        "id": "msg_fake",
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": model,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }
