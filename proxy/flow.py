"""One attempt at a request as a generator of steps: which leg next, and what follows from its answer.

No I/O: `proxy.exchange` performs each step and sends its outcome back in. Each attempt has a fresh transfer id.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import msgspec

from ascend_pd.errors import LocalProtocolError, RemoteProtocolError
from proxy.dialects import Dialect, Handoff
from proxy.errors import LegFailed
from proxy.legs import decode_body, prefill_body
from proxy.request import ClientRequest
from proxy.settings import Role
from proxy.sse import read_error


@dataclass(frozen=True, slots=True)
class Select:
    """Choose an instance of this role; it stays chosen for the attempt."""

    role: Role


@dataclass(frozen=True, slots=True)
class Call:
    """Send P its leg and wait for the whole answer; the outcome is a `CallOutcome`."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Keep:
    """Look after P's hold from now until D has the blocks or will not come."""

    handoff: Handoff


@dataclass(frozen=True, slots=True)
class Relay:
    """Send the answering leg and pass its answer to the client. Nothing follows."""

    role: Role
    body: bytes


@dataclass(frozen=True, slots=True)
class RelayBoth:
    """Send both legs at once, pass D's answer to the client; a failure of either ends both. Nothing follows."""

    decode: bytes
    prefill: bytes


@dataclass(frozen=True, slots=True)
class RelayCalledBack:
    """Send D's leg and pass its answer on; P's leg follows when D calls back. Nothing follows."""

    decode: bytes


@dataclass(frozen=True, slots=True)
class PassThrough:
    """P's answer is the client's answer (a 4xx). Nothing follows."""

    outcome: CallOutcome


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """A whole upstream answer."""

    status: int
    body: bytes
    content_type: str = "application/json"


Step = Select | Call | Keep | Relay | RelayBoth | RelayCalledBack | PassThrough
Flow = Generator[Step, CallOutcome | None, None]


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, object] | None = None
    prompt_token_ids: list[int] | None = None
    choices: list[_Choice] = []


_read_answer = msgspec.json.Decoder(_PrefillAnswer).decode


def pull_flow(request: ClientRequest, dialect: Dialect, transfer_id: str, reuse_tokens: bool = False) -> Flow:
    """P first, then D with P's handoff, and with `reuse_tokens` with the prompt as P tokenised it.

    Raises:
        LegFailed: P answered an error of its own or no valid handoff.
    """
    yield Select(Role.PREFILL)
    fields = {**dialect.prefill_fields, "return_token_ids": True} if reuse_tokens else dialect.prefill_fields
    outcome = _called((yield Call(prefill_body(request, dialect.prefill_params(transfer_id, ""), fields))))
    if 400 <= outcome.status < 500:
        yield PassThrough(outcome)
        return
    if outcome.status != 200:
        raise prefill_error(outcome)
    answer, handoff = read_handoff(outcome.body, dialect, transfer_id)
    yield Keep(handoff)
    yield Select(Role.DECODE)
    yield Relay(
        Role.DECODE, decode_body(request, handoff.params, _prompt_tokens(answer) if reuse_tokens else None)
    )


def layerwise_flow(request: ClientRequest, dialect: Dialect, transfer_id: str, metaserver: str) -> Flow:
    """D reserves and P computes at the same time; P asks the metaserver for the reservation when it needs it."""
    decode = decode_body(request, dialect.decode_params(transfer_id, metaserver))
    prefill = prefill_body(request, dialect.prefill_params(transfer_id, metaserver), dialect.prefill_fields)
    yield Select(Role.DECODE)
    yield Select(Role.PREFILL)
    yield RelayBoth(decode, prefill)


def called_back_flow(request: ClientRequest, dialect: Dialect, transfer_id: str, url: str) -> Flow:
    """D first; it calls `url` with its reservation, and P gets that."""
    yield Select(Role.DECODE)
    yield RelayCalledBack(decode_body(request, dialect.decode_params(transfer_id, url)))


def whole_flow(request: ClientRequest, role: Role) -> Flow:
    """One instance does it all; the client's bytes go there untouched."""
    yield Select(role)
    yield Relay(role, request.raw)


def _called(outcome: CallOutcome | None) -> CallOutcome:
    if outcome is None:
        raise LocalProtocolError("the driver sent no outcome for a call")
    return outcome


def prefill_error(outcome: CallOutcome) -> LegFailed:
    """The failed leg for P's answer of 5xx; a P that is full stays a 503."""
    message = read_error(outcome.body)[1] or f"HTTP {outcome.status}"
    status = 503 if outcome.status == 503 else 502
    return LegFailed(f"prefill: {message}", status, kind="prefill_failed", retry_after_s=1 if status == 503 else 0)


def read_handoff(body: bytes, dialect: Dialect, transfer_id: str) -> tuple[_PrefillAnswer, Handoff]:
    """P's answer and the handoff in it.

    Raises:
        LegFailed: there is none, or another dialect's.
    """
    try:
        answer = _read_answer(body)
        return answer, dialect.handoff(answer.kv_transfer_params, transfer_id)
    except (msgspec.DecodeError, RemoteProtocolError) as error:
        raise LegFailed(f"prefill: {error}", kind="bad_handoff") from error


def _prompt_tokens(answer: _PrefillAnswer) -> list[int] | None:
    """Where vLLM puts them: at the top of a chat answer, in the choice of a completion."""
    return answer.prompt_token_ids or (answer.choices[0].prompt_token_ids if answer.choices else None)
