"""The validation kit's transport part: passes over TCP, notices wrong bytes, reaches memory on a (fake) NPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ascend_pd.wire.connector_config import ConnectorConfig
from ascend_pd.wire.environment import mooncake_environment
from connectors import transport as transports
from scripts.validation import transport
from scripts.validation.report import Part
from tests.fakes.loopback_transport import LoopbackTransport
from tests.fakes.torch_npu import FakeNpu, install

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"transport": "mooncake", "protocol": "tcp", "host": "127.0.0.1", "hardware": "cpu"}


def test_the_part_passes_over_tcp() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.validation.transport_part", "cpu", "0", "1", json.dumps(CONFIG)],
        cwd=ROOT,
        env={**os.environ, **mooncake_environment("tcp"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    [line] = [x for x in done.stdout.splitlines() if x.startswith("part ")] or [done.stderr]
    checks = json.loads(line.removeprefix("part "))["checks"]
    assert [c for c in checks if not c["passed"]] == []
    assert any("fence" in c["name"] for c in checks)


class Stranger:
    """A peer whose memory is not what it should be."""

    def __init__(self, address: int) -> None:
        self.session, self.address = "loopback:0", address


def test_wrong_bytes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transports.TRANSPORTS, "mooncake", lambda *_: LoopbackTransport())
    here, there = (transport.Memory("cpu", 0, ConnectorConfig(), transport.SIZE) for _ in range(2))
    there.write(transport.pattern(1))
    right, wrong = Part("right"), Part("wrong")
    transport._reads(right, here, Stranger(there.address))  # type: ignore[arg-type]
    there.write(np.array([1, 2, 3], dtype=np.uint8), 4095)
    transport._reads(wrong, here, Stranger(there.address))  # type: ignore[arg-type]
    assert right.passed
    assert not any(check.passed for check in wrong.checks)
    assert "the first at 4095" in wrong.checks[0].detail


def test_device_memory_is_filled_read_and_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = FakeNpu()
    install(monkeypatch, npu)
    monkeypatch.setitem(transports.TRANSPORTS, "mooncake", lambda *_: LoopbackTransport())
    here = transport.Memory("A3", 1, ConnectorConfig(), transport.SIZE)
    assert here.device.name == "npu:1"
    here.write(transport.pattern(5))
    assert np.array_equal(here.read(), transport.pattern(5))
    part = Part("staged")
    with npu.running():
        transport._staged(part, here)
    assert [check.name for check in part.checks if not check.passed] == []
