"""vLLM on a CPU waits asleep: its own wait, on its own queue class, with our plugin found as vLLM finds it."""

from __future__ import annotations

import time
from importlib.metadata import entry_points

import pytest
from vllm.distributed.device_communicators import shm_broadcast

from connectors.cpu_plugin import NAP_S

pytestmark = pytest.mark.engine


def waiting() -> shm_broadcast.SpinCondition:
    """A reader that has just read, so that it would spin."""
    condition = shm_broadcast.SpinCondition.__new__(shm_broadcast.SpinCondition)
    condition.is_reader = True
    condition.busy_loop_s = 1.0
    condition.last_read = time.monotonic()
    return condition


def test_a_waiting_process_sleeps_once_the_plugin_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)  # put back afterwards
    [plugin] = entry_points(group="vllm.general_plugins", name="ascend_pd_cpu")
    plugin.load()()
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    waiting().wait()
    assert naps == [NAP_S]


def test_another_platform_keeps_vllms_own_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    from connectors import cpu_plugin

    own = shm_broadcast.sched_yield
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    cpu_plugin.register()
    assert shm_broadcast.sched_yield is own
