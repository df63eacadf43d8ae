"""What a request asks of this engine's half of a transfer, read from its `kv_transfer_params`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, TypeVar

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.wire.params import Params, parse_params
from connectors.compat import kv_params_of

if TYPE_CHECKING:
    from vllm.v1.request import Request as EngineRequest

logger = logging.getLogger(__name__)

Wanted = TypeVar("Wanted", bound=Params)


def params_for(
    request: EngineRequest,
    flag: Literal["do_remote_prefill", "do_remote_decode"],
    wanted: type[Wanted],
    otherwise: str,
) -> Wanted | None:
    """The request's parameters when `flag` is set and they are of the `wanted` kind, else None.

    A request that asks for something this engine cannot read or do is logged and then treated as one that asks for
    nothing, which gives the right text: `otherwise` says what becomes of it.
    """
    raw = kv_params_of(request)
    if not raw.get(flag):
        return None
    try:
        params = parse_params(raw)
    except RemoteProtocolError as error:
        logger.warning("request %s: %s; %s", request.request_id, error, otherwise)
        return None
    if not isinstance(params, wanted):
        logger.warning("request %s: not a %s; %s", request.request_id, wanted.__name__, otherwise)
        return None
    return params
