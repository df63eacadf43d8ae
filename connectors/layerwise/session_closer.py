"""P's way out when a write may still read its blocks: close the transport session, open another; one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ascend_pd.errors import AscendPdError
from connectors.driver import LedgerDriver
from connectors.handoff.actions import SourceAction
from connectors.settings import SPARE_S
from connectors.transport.base import Transport

logger = logging.getLogger(__name__)


class SessionCloser:
    """One per rank.

    Args:
        closed: called with the sessions that are open now, all others being gone; `failed`: with the reason why they
            are not. Both with the driver's lock held.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        driver: LedgerDriver[SourceAction],
        *,
        closed: Callable[[set[str]], None],
        failed: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._driver = driver
        self._closed = closed
        self._failed = failed
        self._wanted = False
        self._running = False
        self._failed_meanwhile: set[str] = set()

    def order(self, via: str) -> None:
        """Close the session `via` soon; the driver's lock is held. While one is being closed, another follows only
        for what failed on the new one."""
        if self._running:
            self._failed_meanwhile.add(via)
        elif not self._wanted:
            self._wanted = True
            self._driver.later(self.run)

    def run(self) -> None:
        """Close what is open if that is still wanted. When this returns, nobody is closing one."""
        with self._driver.changed:
            while self._running:
                self._driver.changed.wait(1.0)
            if not self._wanted:
                return
            self._wanted, self._running = False, True
            self._failed_meanwhile.clear()
        session, reason = "", "closing the transport session failed"
        try:
            session = self._transport.rotate(SPARE_S)
            logger.warning("rank %d: transport endpoint closed and opened anew as %s", self._rank, session)
        except AscendPdError as error:
            reason = str(error)
        finally:
            with self._driver.changed:
                self._running = False
                if session:
                    self._closed({session, self._transport.session})
                else:
                    self._failed(reason)
                if session in self._failed_meanwhile:
                    self.order(session)
                self._driver.changed.notify_all()
