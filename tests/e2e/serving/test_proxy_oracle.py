"""For every parameter, streamed or not: what a client gets through the proxy is what one collocated engine gives."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.cluster import Cluster

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "The quick brown fox jumps over the lazy dog near the river bank. " * 12
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}

COMPLETION_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "default max_tokens": {"max_tokens": None},
    "one token": {"max_tokens": 1},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "n": {"n": 2, "temperature": 0.8, "seed": 11},
    "n greedy": {"n": 2},
    "list": {"prompt": [LONG, "Paris is"]},
    "list with n": {"prompt": ["One, two,", "A, B,"], "n": 2, "temperature": 0.5, "seed": 5},
    "token ids": {"prompt": list(range(100, 300))},
    "list of token ids": {"prompt": [list(range(100, 240)), list(range(500, 520))]},
    "one prompt in a list": {"prompt": [LONG]},
    "stop": {"stop": ["the", "."], "max_tokens": 24},
    "stop included": {"stop": "the", "include_stop_str_in_output": True, "max_tokens": 24},
    "stop_token_ids": {"stop_token_ids": [260, 30, 28], "max_tokens": 24},
    "min_tokens": {"min_tokens": 6, "stop": ["the"]},
    "ignore_eos": {"ignore_eos": True},
    "seed": {"seed": 7, "temperature": 0.7, "top_p": 0.9},
    "penalties": {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"260": -100}},
    "return_token_ids": {"return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "beam search": {"use_beam_search": True, "n": 2},
    "negative max_tokens": {"max_tokens": -1},
    "too long": {"prompt": [7] * 5000},
    "no such model": {"model": "nobody"},
    "temperature of a string": {"temperature": "hot"},
    "no prompt": {"prompt": None},
    "empty list": {"prompt": []},
    "zero n": {"n": 0},
    "unknown field": {"no_such_field": {"a": 1}},
}
CHAT_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "n": {"n": 2, "temperature": 0.8, "seed": 11},
    "n greedy": {"n": 2},
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 16},
    "json_schema": {"response_format": SCHEMA, "max_tokens": 16},
    "no tools wanted": {"tools": [TOOL], "tool_choice": "none"},
    "tools auto": {"tools": [TOOL], "tool_choice": "auto"},
    "tool required": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 32},
    "tool named": {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 32},
    "continue the message": {
        "messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "content parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    "return_token_ids": {"return_token_ids": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "stop": {"stop": ["the"], "max_tokens": 24},
    "seed": {"seed": 3, "temperature": 0.7},
    "no messages": {"messages": None},
    "empty messages": {"messages": []},
    "top_logprobs alone": {"top_logprobs": 2},
    "no such model": {"model": "nobody"},
    "wrong role": {"messages": [{"role": 7, "content": "x"}]},
}
CASES = [(COMPLETIONS, name, extra) for name, extra in COMPLETION_CASES.items()] + [
    (CHAT, name, extra) for name, extra in CHAT_CASES.items()
]
LOGPROB_NOISE = 2e-3
"""The collocated engine's own, from batch to batch."""
VOLATILE = {"id", "created", "request_id", "system_fingerprint", "kv_transfer_params", "metrics"}


def body_of(path: str, extra: dict[str, Any], stream: bool) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 8, "stream": stream}
    base["prompt" if path == COMPLETIONS else "messages"] = (
        LONG if path == COMPLETIONS else [{"role": "user", "content": "Name three colours. " + LONG}]
    )
    body = {**base, **extra}
    if not stream:
        body.pop("stream_options", None)
    return {key: value for key, value in body.items() if value is not None}


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def plain(value: Any) -> Any:
    """Without what differs from answer to answer."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in VOLATILE}
    return [plain(v) for v in value] if isinstance(value, list) else value


def difference(found: Any, wanted: Any, path: str = "$") -> str:
    """Where two answers differ; numbers may by LOGPROB_NOISE."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            return f"{path}: keys {sorted(map(str, found))} instead of {sorted(map(str, wanted))}"
        return next(filter(None, (difference(found[k], wanted[k], f"{path}.{k}") for k in wanted)), "")
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = zip(found, wanted, strict=True)
        return next(filter(None, (difference(f, w, f"{path}[{n}]") for n, (f, w) in enumerate(pairs))), "")
    if isinstance(found, float) and isinstance(wanted, float) and abs(found - wanted) <= LOGPROB_NOISE:
        return ""
    return "" if found == wanted else f"{path}: {found!r} instead of {wanted!r}"


def gathered(raw: bytes) -> dict[str, Any]:
    """A stream by choice: text, finish reasons, token ids and usage, however it was cut into chunks."""
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-300:]
    choices: dict[int, dict[str, Any]] = {}
    usage: list[Any] = []
    identities = set()
    for event in raw.split(b"\n\n")[:-2]:
        chunk = json.loads(event.removeprefix(b"data: "))
        identities.add((chunk["id"], chunk["object"]))
        if chunk.get("usage") and not chunk["choices"]:
            usage.append(chunk["usage"])
        for choice in chunk["choices"]:
            told = choices.setdefault(choice["index"], {"text": "", "finish": [], "tools": "", "ids": []})
            delta = choice.get("delta") or {"content": choice.get("text")}
            told["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                told["tools"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            told["ids"] += choice.get("token_ids") or []
            told["finish"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    assert len(identities) == 1
    return {"choices": choices, "usage": usage}


Asked = Callable[[str, dict[str, Any]], tuple[int, bytes]]


@pytest.fixture(scope="package")
def oracle(collocated: str) -> Asked:
    """What the collocated engine answers, asked once for both modes."""
    known: dict[tuple[str, str], tuple[int, bytes]] = {}

    def asked(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        key = path, json.dumps(body)
        if key not in known:
            known[key] = ask(collocated, path, body)
        return known[key]

    return asked


# How an answer is put together does not depend on who moves the cache: whole answers are asked for in one mode.
@pytest.mark.parametrize(
    "stream", [pytest.param(False, marks=pytest.mark.one_mode), True], ids=["whole", "stream"]
)
@pytest.mark.parametrize(("path", "name", "extra"), CASES, ids=[f"{p.split('/')[2]}-{n}" for p, n, _ in CASES])
def test_the_answer_equals_the_collocated_engines(
    cluster: Cluster, oracle: Asked, path: str, name: str, extra: dict[str, Any], stream: bool
) -> None:
    body = body_of(path, extra, stream)
    wanted_status, wanted = oracle(path, body)
    status, answer = ask(cluster.proxy.url, path, body)
    assert status == wanted_status, answer
    if status == 200 and stream:
        assert not difference(plain(gathered(answer)), plain(gathered(wanted)))
    else:
        assert not difference(plain(json.loads(answer)), plain(json.loads(wanted)))
