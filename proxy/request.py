"""A client's request, read once: what it asks for and what of it matters to routing. Never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from proxy.errors import Refused

BYTES_PER_TOKEN = 4
"""Until an engine reports the true number."""
DEFAULT_OUTPUT_TOKENS = 256
"""Expected output when the client names no limit; only weighs instances against each other."""
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_decode = msgspec.json.Decoder().decode


class Api(StrEnum):
    """The endpoints whose requests may be split over P and D."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Route(StrEnum):
    """Who may serve a request so that the answer equals a collocated engine's."""

    DISAGGREGATED = "disaggregated"
    WHOLE = "whole"
    """One instance computes prompt and answer: a union instance, or D by itself."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request body and what was read from it."""

    api: Api
    raw: bytes
    body: dict[str, Any]
    stream: bool
    model: str
    prompt_tokens: int
    """An estimate, at least 1."""
    output_tokens: int
    """The limit the client gave, or an expectation."""
    route: Route
    why_whole: str = ""


def parse_request(api: Api, raw: bytes) -> ClientRequest:
    """Read a body.

    Raises:
        Refused: not a JSON object, or it carries fields that only the proxy may set.
    """
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    refuse_internal_fields(body)
    why = _why_whole(api, body)
    return ClientRequest(
        api=api,
        raw=raw,
        body=body,
        stream=body.get("stream") is True,
        model=body["model"] if isinstance(body.get("model"), str) else "",
        prompt_tokens=max(1, _prompt_tokens(body)),
        output_tokens=_output_tokens(body),
        route=Route.WHOLE if why else Route.DISAGGREGATED,
        why_whole=why,
    )


def refuse_internal_fields(body: dict[str, Any]) -> None:
    """Only the proxy talks to connectors.

    Raises:
        Refused: naming the field. vLLM merges `vllm_xargs` into the same place, so it is looked into as well.
    """
    for field in INTERNAL_FIELDS:
        if field in body:
            raise Refused(f"{field} is set by the proxy and may not be sent by a client", param=field)
        xargs = body.get("vllm_xargs")
        if isinstance(xargs, dict) and field in xargs:
            raise Refused(f"vllm_xargs may not carry {field}", param="vllm_xargs")


def _why_whole(api: Api, body: dict[str, Any]) -> str:
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("use_beam_search"):
        return "use_beam_search"
    if api is Api.COMPLETIONS:
        if body.get("prompt_embeds") is not None:
            return "prompt_embeds"
        if body.get("echo") and body.get("logprobs") is not None:
            return "echo with logprobs"
        if body.get("max_tokens") == 0:
            return "max_tokens=0"
        if isinstance(body.get("prompt"), list) and not _is_token_ids(body["prompt"]):
            return "several prompts"
    return "several samples" if isinstance(body.get("n"), int) and body["n"] > 1 else ""


def _is_token_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def _output_tokens(body: dict[str, Any]) -> int:
    for field in ("max_completion_tokens", "max_tokens"):
        if isinstance(body.get(field), int) and body[field] > 0:
            return int(body[field])
    return DEFAULT_OUTPUT_TOKENS


def _prompt_tokens(body: dict[str, Any]) -> int:
    if "messages" in body:
        return _text_bytes(body["messages"]) // BYTES_PER_TOKEN
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return sum(_one_prompt_tokens(p) for p in prompt) if not _is_token_ids(prompt) else len(prompt)
    return _one_prompt_tokens(prompt)


def _one_prompt_tokens(prompt: object) -> int:
    if isinstance(prompt, str):
        return _text_bytes(prompt) // BYTES_PER_TOKEN
    return len(prompt) if isinstance(prompt, list) else 0


def _text_bytes(content: object) -> int:
    """UTF-8 bytes of the text in messages or content parts; pictures and sound do not count."""
    if isinstance(content, str):
        return len(content) if content.isascii() else len(content.encode("utf-8", "surrogatepass"))
    if isinstance(content, list):
        return sum(_text_bytes(part) for part in content)
    if isinstance(content, dict):
        return _text_bytes(content.get("content")) + _text_bytes(content.get("text"))
    return 0
