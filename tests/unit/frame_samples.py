"""One message of every type, fully filled, and the golden frames made of them.

`python -m tests.unit.frame_samples` writes the golden file; only a new `WIRE_VERSION` may change bytes in it.
"""

from __future__ import annotations

import json
from pathlib import Path

from ascend_pd.layout.description import KVLayout, Part, Region
from ascend_pd.layout.staging import Cells
from ascend_pd.wire import WIRE_VERSION
from ascend_pd.wire.frames import FrameCodec, message_tag
from ascend_pd.wire.identity import EngineRef, Fingerprint
from ascend_pd.wire.messages import (
    Abort,
    Answer,
    Ask,
    Checksum,
    ChecksumReply,
    Claim,
    Done,
    Hello,
    HelloReply,
    Pushed,
    Release,
    Renew,
    Reply,
    Request,
    Stage,
    StageOpen,
    StageReady,
    Story,
    Verdict,
    WorkerInfo,
)

SECRET = b"golden secret, 1234567890"
REQUEST_ID = bytes(range(16))
GOLDEN = Path(__file__).parent / "golden" / f"frames_v{WIRE_VERSION}.json"

PREFILL = EngineRef("p0", "epoch-p")
DECODE = EngineRef("d0", "epoch-d")
FINGERPRINT = Fingerprint(
    architecture="LlamaForCausalLM",
    model_config_hash="c0ffee",
    num_layers=2,
    num_kv_heads=3,
    head_size=64,
    kv_cache_dtype="bfloat16",
    hardware="cpu",
    tokenizer_hash="70",
    chat_template_hash="71",
    speculative="none",
    attention_isa="vec",
)
LAYOUT = KVLayout(
    regions=(Region(0, Part.KV, 4096, 1024, 256, 64, 64, 0), Region(1, Part.K, 1 << 40, 1024, 256, 64, 64, 1)),
    dtype="bfloat16",
    num_blocks=8,
    block_size=32,
    tp_rank=0,
    tp_size=1,
    num_kv_heads=3,
    heads=(0, 1, 2),
    packed="vec",
)
WORKER = WorkerInfo(
    tp_rank=0,
    pp_rank=0,
    transport="mooncake/tcp",
    session="127.0.0.1:15001",
    service_host="10.0.0.1",
    service_port=36100,
    service_life="c3d4",
    stages=True,
    checksums=True,
    layout=LAYOUT,
)

REQUESTS: tuple[Request, ...] = (
    Hello(fingerprint=FINGERPRINT, role="decode"),
    Done(transfer_id="t1", source_epoch="epoch-p", sink=DECODE, sink_rank=0, sink_ranks=2, read_id="r1"),
    Renew(transfer_id="t1", source_epoch="epoch-p"),
    Release(transfer_id="t1", epoch="epoch-p", reason="client gone"),
    Claim(
        transfer_id="t1",
        sink_epoch="epoch-d",
        source=PREFILL,
        source_ranks=2,
        prompt_hash="ab",
        source_host="10.0.0.1",
        source_port=36000,
        endpoints=2,
    ),
    Pushed(
        transfer_id="t1",
        sink_epoch="epoch-d",
        source=PREFILL,
        source_rank=1,
        num_tokens=512,
        bytes_sent=1 << 33,
        dirty=True,
    ),
    Abort(transfer_id="t1", epoch="epoch-d", sender=PREFILL, rank=1, drained=True, reason="cancelled"),
    Ask(transfer_id="t1"),
    StageOpen(life="c3d4", caller="e5f6", layout=LAYOUT, push=False, void="a1b2"),
    Stage(
        token="a1b2",
        sequence=3,
        slot=1,
        choice=0,
        cells=Cells(strand=0, regions=(0, 1), units=((0, 4), (9, 1))),
        block_ids=((3, 2, 7),),
    ),
    Checksum(
        question="f00d",
        life="c3d4",
        layout=LAYOUT,
        push=True,
        choice=1,
        cells=Cells(strand=0, regions=(0,), units=((0, 4),)),
        block_ids=((3, 2, 7),),
    ),
)
REPLIES: tuple[Reply, ...] = (
    HelloReply(
        engine=PREFILL,
        role="prefill",
        fingerprint=FINGERPRINT,
        block_size=32,
        tp_size=1,
        pp_size=1,
        workers=(WORKER,),
    ),
    Answer(verdict=Verdict.GONE, reason="expired", lease_seconds=30.0, drained=True),
    Story(known=True, state="HELD", reason="", timings_ms={"transfer": 12.5}, bytes_moved=4096),
    StageReady(token="a1b2", slots=(1 << 40, (1 << 40) + 4096), slot_bytes=4096),
    ChecksumReply(crc32=0xCBF43926),
)


def golden_frames() -> dict[str, str]:
    """Name → frame in hex, of every sample, signed and unsigned."""
    frames = {}
    for label, codec in (("signed", FrameCodec(SECRET)), ("unsigned", FrameCodec())):
        for request in REQUESTS:
            frames[f"{message_tag(request)} {label}"] = codec.encode_request(
                REQUEST_ID, "p0@epoch-p", request
            ).hex()
        for reply in REPLIES:
            frames[f"{message_tag(reply)} {label}"] = codec.encode_reply(REQUEST_ID, "d0@epoch-d", reply).hex()
    return frames


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_frames(), indent=1) + "\n", encoding="utf-8")
