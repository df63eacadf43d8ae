"""Our log lines go where vLLM's go, at vLLM's level."""

from __future__ import annotations

import logging


def follow_vllm() -> None:
    """Give our loggers the handlers and level of vLLM's, which alone are configured in its processes."""
    theirs = logging.getLogger("vllm")
    for name in ("connectors", "ascend_pd"):
        ours = logging.getLogger(name)
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = not theirs.handlers
