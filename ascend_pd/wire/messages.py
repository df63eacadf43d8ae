"""Side-channel messages. Every request may be lost, repeated, late or early: repeating one changes nothing.

A request is answered by exactly one reply type. `source` is P, `sink` is D, whoever moves the bytes.
Each engine core serves one side channel (scheduler process, `kv_port` + DP rank); workers and the proxy are
clients of it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.staging import Cells
from ascend_pd.wire.identity import EngineRef, Fingerprint


class Verdict(StrEnum):
    """The answer to a message about one transfer."""

    OK = "ok"
    GONE = "gone"
    """The transfer is not, or no longer, in a state where this can be granted."""
    EPOCH = "epoch"
    """The message is meant for another life of this engine."""
    REFUSED = "refused"
    LATER = "later"
    """Not now: the receiver's endpoint is being renewed. Shake hands and ask again."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's transport endpoint and cache layout."""

    tp_rank: int
    pp_rank: int
    transport: str
    """`mooncake/tcp`, `mooncake/ascend`, `memfabric/device_sdma`, …: both ends must be equal."""
    session: str
    """The name under which the transport's peers reach this worker; new after each fence."""
    service_host: str = ""
    service_port: int = 0
    """Where this worker takes Stage and Checksum messages; 0 when it does neither."""
    service_life: str = ""
    """Names this life of the service there: a nonce."""
    stages: bool = False
    """It takes Stage messages."""
    checksums: bool = False
    """It takes Checksum messages."""
    layout: KVLayout


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hello"):
    """Who are you? Also used by the proxy (with no fingerprint) when it pairs engines."""

    fingerprint: Fingerprint | None = None
    role: str = ""


class HelloReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hello_reply"):
    """`workers` is empty while the engine is still starting."""

    engine: EngineRef
    role: str
    fingerprint: Fingerprint
    block_size: int
    tp_size: int
    pp_size: int
    workers: tuple[WorkerInfo, ...]
    endpoints: int = 0
    """Counts the fences of this life: the workers' sessions are new after each."""
    unsound: str = ""
    """Why this engine must be restarted: blocks that could not be made safe. It takes no new transfers."""


class Done(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="done"):
    """D rank → P (pull): every read of `read_id` succeeded; do you vouch for the bytes?"""

    transfer_id: str
    source_epoch: str
    sink: EngineRef
    sink_rank: int
    sink_ranks: int
    read_id: str


class Renew(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="renew"):
    """D or proxy → P: keep the hold for another lease."""

    transfer_id: str
    source_epoch: str


class Release(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="release"):
    """Proxy or D → P or D: nobody will come for this transfer; let go of its blocks.

    An empty `epoch` means whichever life of the engine holds it.
    """

    transfer_id: str
    epoch: str = ""
    reason: str


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="claim"):
    """P → D (layer-wise), before the first write: may this life of P write into the reservation?

    P learns D's sessions before it claims and does not look them up again for this transfer: a grant is bound to
    the endpoints of that time, so that D's fence ends it.
    """

    transfer_id: str
    sink_epoch: str
    source: EngineRef
    source_ranks: int
    prompt_hash: str
    source_host: str = ""
    source_port: int = 0
    """P's side channel, where D sends its Abort; without it D's only way out is its own fence."""
    endpoints: int = 0
    """`HelloReply.endpoints` of the handshake that P's sessions come from."""


class Pushed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pushed"):
    """P rank → D (layer-wise): every write of this rank is acknowledged."""

    transfer_id: str
    sink_epoch: str
    source: EngineRef
    source_rank: int
    num_tokens: int
    """Prompt tokens whose cache is now complete on D, D's own prefix hit included."""
    bytes_sent: int
    dirty: bool = False
    """An operation of this transfer once returned an error, so stray bytes may still land."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="abort"):
    """Either end → the other: this transfer will not complete; stop touching its blocks and say when drained."""

    transfer_id: str
    epoch: str
    """The receiver's epoch."""
    sender: EngineRef
    rank: int = 0
    drained: bool = False
    """The sender's own operations on the receiver's memory are all over."""
    reason: str


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ask"):
    """Proxy → either end: why did this transfer fail, and where does it stand?"""

    transfer_id: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="answer"):
    """The reply to Done, Renew, Release, Claim, Pushed and Abort."""

    verdict: Verdict
    reason: str = ""
    lease_seconds: float = 0.0
    drained: bool = False


class Story(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="story"):
    """The reply to Ask; `known` is False when this engine never heard of the transfer or has forgotten it."""

    known: bool
    state: str = ""
    reason: str = ""
    timings_ms: dict[str, float] = {}
    """What was measured of this transfer so far. On P: `prefill_queue` (known to the engine, not yet scheduled),
    `prefill` (first scheduled until finished), layer-wise `exposed` (what was still to be pushed after). On D:
    `decode_queue` (known, blocks not yet allocated), pull `transfer` (first byte asked for until vouched for).
    """
    bytes_moved: int = 0


class StageOpen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stage_open"):
    """Active rank → passive rank: I want to move small pieces packed; give me slots of your staging buffer."""

    life: str
    """The receiver's, from its `WorkerInfo`."""
    caller: str
    """Names this life of the caller: a nonce."""
    layout: KVLayout
    """The caller's: both ends derive addresses from the same plan."""
    push: bool
    """The caller writes into the receiver's slots, which then scatters; otherwise the receiver gathers and the
    caller reads."""
    void: str = ""
    """A token that the caller will not use again, because a transfer with it failed."""


class StageReady(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stage_ready"):
    """The reply to StageOpen. `token` names this lease of the slots; a fence or a restart makes it void."""

    token: str
    slots: tuple[int, ...]
    """Addresses in registered memory."""
    slot_bytes: int


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stage"):
    """Active rank → passive rank: gather this batch into the slot, or scatter it out of the slot.

    Carried out at most once: `sequence` grows with every batch of a slot, a repeated one is answered from memory
    and an older one refused.
    """

    token: str
    sequence: int
    slot: int
    choice: int
    """Which of the plan's equally good choices of senders."""
    cells: Cells
    block_ids: tuple[tuple[int, ...], ...]
    """The receiver's blocks of the request, per KV cache group."""


class Checksum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="checksum"):
    """Active rank → passive rank: what does this batch of your cache add up to, now that it was moved?"""

    question: str
    """A nonce: a repeat of the same question is answered from memory."""
    life: str
    """The receiver's, from its `WorkerInfo`."""
    layout: KVLayout
    """The caller's: both ends derive addresses from the same plan."""
    push: bool
    """The caller is the source."""
    choice: int
    """Which of the plan's equally good choices of senders."""
    cells: Cells
    block_ids: tuple[tuple[int, ...], ...]
    """The receiver's blocks of the request, per KV cache group."""


class ChecksumReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="checksum_reply"):
    """The reply to Checksum: CRC-32 of the batch's bytes, cell after cell."""

    crc32: int


Request = Hello | Done | Renew | Release | Claim | Pushed | Abort | Ask | StageOpen | Stage | Checksum
Reply = HelloReply | Answer | Story | StageReady | ChecksumReply


REPLY_TYPES: dict[type, type] = {Hello: HelloReply, Ask: Story, StageOpen: StageReady, Checksum: ChecksumReply}
"""Requests that are answered by more than an `Answer`."""


def may_answer(request: Request, reply: Reply) -> bool:
    """Whether this type of reply belongs to this type of request; an `Answer` may refuse any request."""
    if isinstance(reply, Answer):
        return True
    expected = REPLY_TYPES.get(type(request))
    return expected is not None and isinstance(reply, expected)
