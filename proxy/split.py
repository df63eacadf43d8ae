"""Requests with several prompts or samples: split into members of one prompt and one sample, joined again.

Every member has its own transfer, so that no two engine requests ever share a transfer id. Member (p, i) answers
as choice p·n + i, as vLLM numbers them, and gets seed + i, as vLLM seeds its samples. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from proxy.request import ClientRequest, Route, is_token_ids

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Member:
    """One part of a split request; only `first_sample` members bring their prompt's count into the joint usage."""

    index: int
    prompt: int
    """Which of the request's prompts."""
    sample: int

    @property
    def first_sample(self) -> bool:
        return self.sample == 0


def members(request: ClientRequest) -> list[Member]:
    """The parts, in choice order."""
    prompts = _prompts(request)
    samples = request.body.get("n") or 1
    return [
        Member(p * samples + i, p, i)
        for p in range(1 if prompts is None else len(prompts))
        for i in range(samples)
    ]


def _prompts(request: ClientRequest) -> list[Any] | None:
    """The prompts of a list of prompts; None for one prompt."""
    prompt = request.body.get("prompt")
    return prompt if isinstance(prompt, list) and not is_token_ids(prompt) else None


def member_request(request: ClientRequest, member: Member) -> ClientRequest:
    """What one part asks for. Built when the part's turn comes: all at once they would be `n` times the body."""
    prompts = _prompts(request)
    body = {key: value for key, value in request.body.items() if key != "n"}
    if prompts is not None:
        body["prompt"] = prompts[member.prompt]
    seed = body.get("seed")
    if isinstance(seed, int) and member.sample:
        body["seed"] = min(seed + member.sample, MAX_SEED)
    return replace(
        request,
        raw=msgspec.json.encode(body),
        body=body,
        prompt_tokens=max(1, request.prompt_tokens // (1 if prompts is None else len(prompts))),
        route=Route.DISAGGREGATED,
    )


def joined(answers: list[tuple[Member, dict[str, Any]]]) -> dict[str, Any]:
    """One answer from the members' whole answers: identity of the first, all choices, usage summed."""
    ordered = sorted(answers, key=lambda pair: pair[0].index)
    joint = dict(ordered[0][1])
    joint["choices"] = [{**choice, "index": m.index} for m, a in ordered for choice in _choices(a)]
    usage = JointUsage()
    for member, answer in ordered:
        usage.add(member, answer.get("usage"))
    if usage.seen:
        joint["usage"] = usage.total()
    joint["kv_transfer_params"] = None
    return joint


def _choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


@dataclass(slots=True)
class JointUsage:
    """Prompt tokens once per prompt, completion tokens of all, details added up."""

    seen: dict[str, Any] = field(default_factory=dict)

    def add(self, member: Member, usage: object) -> None:
        """One member's final usage."""
        if not isinstance(usage, dict):
            return
        for key, value in usage.items():
            of_prompt = key.startswith("prompt_tokens")
            if of_prompt and not member.first_sample:
                continue
            self.seen[key] = _sum(self.seen.get(key), value)

    def total(self) -> dict[str, Any]:
        """The joint usage."""
        usage = dict(self.seen)
        usage["total_tokens"] = (usage.get("prompt_tokens") or 0) + (usage.get("completion_tokens") or 0)
        return usage


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _sum(one.get(key), other.get(key)) for key in {**one, **other}}
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return other if one is None else one


@dataclass(slots=True)
class JointStream:
    """Rewrites members' chunks into chunks of one answer."""

    identity: dict[str, Any] = field(default_factory=dict)
    usage: JointUsage = field(default_factory=JointUsage)
    last: dict[str, Any] | None = None

    def chunk(self, member: Member, data: bytes) -> bytes:
        """The event for the client, empty for what is held back (a member's final usage, its [DONE]).

        `data` is one event's payload.

        Raises:
            msgspec.DecodeError: not a chunk.
        """
        if data in (b"[DONE]", b""):  # nothing: a comment
            return b""
        chunk: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        if not self.identity:
            self.identity = {key: chunk[key] for key in ("id", "created") if key in chunk}
        chunk.update(self.identity)
        if not chunk.get("choices") and chunk.get("usage"):
            self.usage.add(member, chunk["usage"])
            self.last = chunk
            return b""
        chunk["choices"] = [{**choice, "index": member.index} for choice in _choices(chunk)]
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def ending(self) -> bytes:
        """The joint usage, if members sent theirs, and [DONE]."""
        tail = b"data: [DONE]\n\n"
        if self.last is None:
            return tail
        final = {**self.last, "choices": [], "usage": self.usage.total()}
        return b"data: " + msgspec.json.encode(final) + b"\n\n" + tail
