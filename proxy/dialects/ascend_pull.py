"""vllm-ascend's pull connector, `MooncakeConnectorV1`.

Its P hands off only when it ends by length, so the prefill leg forbids an early end (`min_tokens` 1 masks EOS);
the handoff goes to D verbatim. There is no release by request: a hold that nobody fetches waits for its timer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects.nixl import Nixl


class AscendPull(Nixl):
    """The same shapes as NixlConnector's, with more fields in the handoff."""

    name = "ascend-pull"
    prefill_fields: Mapping[str, Any] = {"min_tokens": 1}
