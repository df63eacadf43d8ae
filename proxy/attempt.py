"""What one attempt at a request holds: load on instances, open answers, a hold on P. Given back exactly once."""

from __future__ import annotations

from proxy.callbacks import Callback
from proxy.dialects import Hold
from proxy.fleet import Load
from proxy.holds import Holds, Keeper
from proxy.settings import Role
from proxy.upstream import Answer


class Attempt:
    """`close` is called at the end of every attempt, however it ended."""

    __slots__ = (
        "_holds",
        "answers",
        "callback",
        "delivered",
        "hold",
        "keeper",
        "loads",
        "metaserver",
        "refused",
        "transfer_id",
        "transferring",
    )

    def __init__(self, transfer_id: str, holds: Holds) -> None:
        self.transfer_id = transfer_id
        self.loads: dict[Role, Load] = {}
        self.answers: list[Answer] = []
        self.hold: Hold | None = None
        self.keeper: Keeper | None = None
        self.callback: Callback | None = None
        self.metaserver = ""
        """Where D's reservation is to be withdrawn when this fails."""
        self.transferring = False
        """A leg of a P/D transfer has been sent."""
        self.delivered = False
        """D has shown its first event: it has the cache."""
        self.refused = False
        """D answered 4xx: it will not fetch the cache."""
        self._holds = holds

    def keep(self, hold: Hold) -> None:
        """Look after P's hold."""
        self.hold = hold
        self.keeper = self._holds.keep(hold)

    def first_event(self) -> None:
        """D decodes: P's hold is D's to confirm, and P is free of this request. A refusal is no event."""
        self.delivered = True
        if self.keeper is not None:
            self.keeper.stop()

    def side(self, role: Role) -> str:
        """The side channel of this attempt's instance of a role; empty when unknown."""
        load = self.loads.get(role)
        configured = load.instance.settings.side if load is not None else ""
        if role is Role.PREFILL and self.hold is not None and not configured:
            return self.hold.side
        return configured

    def close(self, reason: str) -> None:
        """Drop connections that are still open (the engine aborts), let go of blocks, give the load back."""
        if self.keeper is not None:
            self.keeper.stop()
        for answer in self.answers:
            answer.close()
        if self.transferring and not self.delivered:
            epoch = self.hold.epoch if self.hold is not None else ""
            self._holds.release(self.side(Role.PREFILL), self.transfer_id, reason, epoch)
            self._holds.release(self.side(Role.DECODE), self.transfer_id, reason)
            self._holds.withdraw(self.metaserver, self.transfer_id, reason)
        for load in self.loads.values():
            load.close()
