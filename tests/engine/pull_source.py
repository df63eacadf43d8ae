"""A prefill engine without vLLM's engine, as a process of its own: holds the blocks it is told to."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from ascend_pd.wire.params import PullHandoff, parse_params
from connectors.endpoint import EngineEndpoint
from connectors.pull.prefill import PrefillScheduler
from connectors.stories import StoryBook
from tests.engine.fork_server import ForkServer
from tests.engine.kv_fixture import FINGERPRINT, engine_request, make_cache, settings

SEED = 7
"""Of its cache's bytes, see `make_content`."""


class Source:
    """The parent's handle. `order`: see `serve`."""

    def __init__(self, server: ForkServer, holds: list[tuple[str, list[int], list[int]]], **order: Any) -> None:
        self.process = server.start(
            "tests.engine.pull_source:serve",
            json.dumps({"holds": holds, **order}),
            env={**os.environ, "GLOG_minloglevel": "2"},
        )
        self.handoffs: list[PullHandoff] = []
        for params in json.loads(self._line()):
            found = parse_params(params)
            assert isinstance(found, PullHandoff)
            self.handoffs.append(found)

    def released(self) -> str:
        """The next request whose blocks go back."""
        return str(json.loads(self._line())["released"])

    def kill(self) -> None:
        """As a crash ends it."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """End it in order, also when it is stopped."""
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()

    def _line(self) -> str:
        return self.process.stdout.readline()


StartSource: TypeAlias = Callable[..., Source]
"""`Source`'s arguments but the server; see conftest."""


def serve(text: str) -> None:
    """Take an order, as JSON: `holds` (a list of [transfer id, prompt, block ids]), `port`, `config`, `faults`,
    `fingerprint`. Prints one JSON line with the handoffs, then one per released request, until its standard input
    closes."""
    order = json.loads(text)
    own = settings("prefill", order.get("port", 0), faults=order.get("faults", ""), **order.get("config", {}))
    cache = make_cache(SEED)
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
