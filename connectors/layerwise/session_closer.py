"""P's way out when a write may still read its blocks: close the transport session, open another; one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ascend_pd.errors import AscendPdError
from connectors.driver import LedgerDriver
from connectors.handoff.actions import SourceAction
from connectors.transport.base import Transport

logger = logging.getLogger(__name__)

SPARE_S = 2.0
"""How long the healthy writes beside the failed one may still take: each that is cut makes its decode engine fence."""


class SessionCloser:
    """One per rank.

    Args:
        closed: called with the name of the session that is gone; `failed`: with the reason why it is not. Both with
            the driver's lock held.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        driver: LedgerDriver[SourceAction],
        *,
        closed: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._driver = driver
        self._closed = closed
        self._failed = failed
        self._wanted = False
        self._running = False
        self._again = False

    def order(self) -> None:
        """Close it soon; the driver's lock is held. One that is ordered while another is being closed follows it:
        what failed meanwhile may have used the new session."""
        if self._running:
            self._again = True
        elif not self._wanted:
            self._wanted = True
            self._driver.later(self.run)

    def run(self) -> None:
        """Close it if that is still wanted. When this returns, nobody is closing one."""
        with self._driver.changed:
            while self._running:
                self._driver.changed.wait(1.0)
            if not self._wanted:
                return
            self._wanted, self._running = False, True
            former = self._transport.session
        reason = ""
        try:
            session = self._transport.rotate(SPARE_S)
            logger.warning("rank %d: transport endpoint closed and opened anew as %s", self._rank, session)
        except AscendPdError as error:
            reason = str(error)
        with self._driver.changed:
            self._running = False
            if reason:
                self._failed(reason)
            else:
                self._closed(former)
            if self._again:
                self._again = False
                self.order()
            self._driver.changed.notify_all()
