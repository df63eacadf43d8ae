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
MAX_MEMBERS = 1024
"""Prompts times samples of one request."""
MAX_NAME = 256
"""Characters that are kept of what a client calls things: models, sessions, paths."""
TOO_DEEP = "the body is nested too deeply"
GREEDY_BELOW = 1e-5
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WHOLE_PATHS = ("/v1/responses", "/v1/messages")
_decode = msgspec.json.Decoder().decode


class Route(StrEnum):
    """Who may serve a request so that the answer equals a collocated engine's."""

    DISAGGREGATED = "disaggregated"
    SPLIT = "split"
    """Several prompts or samples: as many disaggregated members, joined into one answer."""
    WHOLE = "whole"
    """One instance computes prompt and answer."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request body and what was read from it."""

    path: str
    raw: bytes
    body: dict[str, Any]
    stream: bool
    model: str
    """Its first characters, for the records."""
    prompt_tokens: int
    """An estimate, at least 1."""
    output_tokens: int
    """The limit the client gave, or an expectation."""
    route: Route
    why_whole: str = ""


def parse_request(path: str, raw: bytes) -> ClientRequest:
    """Read a body.

    Raises:
        Refused: not a JSON object, nested too deeply, more than MAX_MEMBERS answers, or it carries fields that
            only the proxy may set.
    """
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise Refused(TOO_DEEP) from error
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    refuse_internal_fields(body)
    members = _members(path, body)
    if members > MAX_MEMBERS:
        raise Refused(f"prompts times n may be at most {MAX_MEMBERS}", param="n" if body.get("n") else "prompt")
    why = _why_whole(path, body)
    route = Route.WHOLE if why else Route.SPLIT if members > 1 else Route.DISAGGREGATED
    model = body.get("model")
    return ClientRequest(
        path=path,
        raw=raw,
        body=body,
        stream=body.get("stream") is True,
        model=model[:MAX_NAME] if isinstance(model, str) else "",
        prompt_tokens=_prompt_tokens(body),
        output_tokens=_output_tokens(body),
        route=route,
        why_whole=why,
    )


def refuse_internal_fields(body: dict[str, Any]) -> None:
    """Only the proxy talks to connectors.

    Raises:
        Refused: naming the field. vLLM merges `vllm_xargs` into the same place, so it is looked into as well.
    """
    xargs = body.get("vllm_xargs")
    for field in INTERNAL_FIELDS:
        if field in body:
            raise Refused(f"{field} is set by the proxy and may not be sent by a client", param=field)
        if isinstance(xargs, dict) and field in xargs:
            raise Refused(f"vllm_xargs may not carry {field}", param="vllm_xargs")


def _why_whole(path: str, body: dict[str, Any]) -> str:
    if path not in (CHAT, COMPLETIONS):
        return path
    for field in ("prompt_logprobs", "prompt_embeds"):
        if body.get(field) is not None:
            return field
    if body.get("use_beam_search"):
        return "use_beam_search"
    if path == COMPLETIONS and body.get("echo") and body.get("logprobs") is not None:
        return "echo with logprobs"
    if 0 in (_limit(body, "max_tokens"), _limit(body, "max_completion_tokens")):
        return "max_tokens=0"
    if _malformed(path, body):
        return "malformed"
    return ""


def _malformed(path: str, body: dict[str, Any]) -> bool:
    """Shapes an engine refuses anyway: let it say so in its own words, without a transfer."""
    n = body.get("n")
    if n is not None and (type(n) is not int or n < 1):
        return True
    temperature = body.get("temperature")
    if (n or 1) > 1 and isinstance(temperature, int | float) and temperature < GREEDY_BELOW:
        return True  # vLLM refuses several greedy samples
    if path == CHAT:
        return not isinstance(body.get("messages"), list)
    prompt = body.get("prompt")
    return not prompt or not isinstance(prompt, str | list)


def is_token_ids(prompt: object) -> bool:
    """One prompt given as token ids."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _members(path: str, body: dict[str, Any]) -> int:
    """Prompts times samples; a list of prompts or an `n` that is none counts as one."""
    if path not in (CHAT, COMPLETIONS):
        return 1
    prompts = 1
    prompt = body.get("prompt")
    if path == COMPLETIONS and isinstance(prompt, list) and not is_token_ids(prompt):
        prompts = max(1, len(prompt))
    n = body.get("n")
    return prompts * n if type(n) is int and n > 0 else prompts


def _limit(body: dict[str, Any], field: str) -> int | None:
    value = body.get(field)
    return value if type(value) is int else None


def _output_tokens(body: dict[str, Any]) -> int:
    limit = _limit(body, "max_completion_tokens") or _limit(body, "max_tokens")
    return limit if limit and limit > 0 else DEFAULT_OUTPUT_TOKENS


def _prompt_tokens(body: dict[str, Any]) -> int:
    """At least 1.

    Raises:
        Refused: nested too deeply.
    """
    try:
        return max(1, _estimated_tokens(body))
    except RecursionError as error:
        raise Refused(TOO_DEEP) from error


def _estimated_tokens(body: dict[str, Any]) -> int:
    for field in ("messages", "input"):
        if field in body:
            return _text_bytes(body[field]) // BYTES_PER_TOKEN
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not is_token_ids(prompt):
        return sum(_one_prompt_tokens(p) for p in prompt)
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


def prefix_hashes(body: dict[str, Any], block_tokens: int) -> tuple[int, ...]:
    """Chained hashes of the full blocks of a prompt, as a prefix cache would chain them.

    Token ids are cut exactly; text is cut at as many bytes as a block of tokens has on average, so that equal
    beginnings of text give equal first hashes. Hashes are this process's own.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and is_token_ids(prompt):
        data = b"".join((t & 0xFFFFFFFF).to_bytes(BYTES_PER_TOKEN, "little") for t in prompt if type(t) is int)
    elif isinstance(prompt, str):
        data = prompt.encode("utf-8", "surrogatepass")
    else:
        shaping = [body.get("tools"), body.get("messages", prompt)]
        data = msgspec.json.encode(shaping)
    size = block_tokens * BYTES_PER_TOKEN
    hashes = []
    chained = hash(data[:0])
    for start in range(0, len(data) - size + 1, size):
        chained = hash((chained, data[start : start + size]))
        hashes.append(chained)
    return tuple(hashes)
