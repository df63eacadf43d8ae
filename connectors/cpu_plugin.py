"""A vLLM plugin for engines on a CPU: their processes sleep while they wait for each other, instead of spinning.

vLLM's processes talk over shared memory, and whoever waits calls `sched_yield` in a loop, for a second after each
message and for as long as a request waits for its cache. Cores are then busy with waiting, and with more waiting
processes than cores everything else on the machine stands still: see docs/decisions/0080.
"""

from __future__ import annotations

import logging
import time
from importlib import import_module

logger = logging.getLogger(__name__)

NAP_S = 100e-6
"""Longer than waking up takes, far shorter than a step on a CPU."""
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"


def register() -> None:
    """Make this process's waits on vLLM's queues naps; nothing on other platforms.

    The entry point of the group `vllm.general_plugins`: vLLM calls it in each of its processes, maybe repeatedly.
    `VLLM_PLUGINS` chooses which plugins it loads.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    queues = import_module(_QUEUES)
    if not hasattr(queues, "sched_yield"):
        logger.warning("this vLLM waits in a way that is not known here: its processes may spin on the CPU")
        return
    queues.sched_yield = _nap  # type: ignore[attr-defined]


def _nap() -> None:
    time.sleep(NAP_S)
