"""What an engine tells of one transfer over its side channel."""

from __future__ import annotations

import time

from ascend_pd.wire.messages import Ask, Story
from connectors.sidechannel.client import SideChannelClient


def story_when(
    client: SideChannelClient, address: tuple[str, int], transfer_id: str, timing: str, timeout_s: float = 10.0
) -> Story:
    """The story of a transfer once it has the named timing.

    Raises:
        TimeoutError: it never had.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        story = client.request(address, Ask(transfer_id=transfer_id), 5.0)
        if isinstance(story, Story) and timing in story.timings_ms:
            return story
        time.sleep(0.05)
    raise TimeoutError(f"transfer {transfer_id} has no {timing!r}")
