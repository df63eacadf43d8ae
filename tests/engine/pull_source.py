"""A prefill engine without vLLM's engine, as a process of its own: holds the blocks it is told to.

Arguments: JSON with `seed`, `holds` (a list of [transfer id, prompt, block ids]), `config`, `faults`, `fingerprint`.
Prints one JSON line with the handoffs, then one per released request, until its standard input closes.
"""

from __future__ import annotations

import json
import select
import sys

import msgspec

from connectors.endpoint import EngineEndpoint
from connectors.pull.prefill import PrefillScheduler
from connectors.stories import StoryBook
from tests.engine.kv_fixture import FINGERPRINT, engine_request, make_cache, settings


def main() -> None:
    order = json.loads(sys.argv[1])
    own = settings("prefill", order.get("port", 0), faults=order.get("faults", ""), **order.get("config", {}))
    cache = make_cache(order["seed"])
    prefill = PrefillScheduler(own, StoryBook())
    fingerprint = msgspec.structs.replace(FINGERPRINT, **order.get("fingerprint", {}))
    endpoint = EngineEndpoint(own, fingerprint, prefill.handle, prefill.tick)
    prefill.open(endpoint.ref, endpoint.address, endpoint.server.wake)
    endpoint.publish((cache.info,))
    endpoint.start()
    handoffs = []
    for transfer_id, prompt, block_ids in order["holds"]:
        request = engine_request(transfer_id, prompt, {"do_remote_decode": True, "transfer_id": transfer_id})
        prefill.on_new_request(request)
        kept, params = prefill.ended(request, (block_ids,))
        handoffs.append(params if kept else None)
    print(json.dumps(handoffs), flush=True)
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        for request_id in prefill.take_released():
            print(json.dumps({"released": request_id}), flush=True)
    endpoint.close()
    cache.transport.close()


if __name__ == "__main__":
    main()
