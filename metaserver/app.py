"""The metaserver's HTTP interface as an ASGI app: by itself (`python -m metaserver`) or mounted in another app."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.wire import WIRE_VERSION
from ascend_pd.wire.params import Reservation, parse_reservation
from ascend_pd.wire.registry import parse_engine_entry
from metaserver.http import Gate, RefusedError, float_parameter, invalid, json_response
from metaserver.metrics import Metrics
from metaserver.rendezvous import Rendezvous, TooManyWaitsError
from metaserver.settings import Settings
from metaserver.store import Ended, EngineStore, PostOutcome, ReservationStore

_TRANSFER_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ROLES = ("prefill", "decode", "union")
_MAX_REASON_CHARS = 256


class Metaserver:
    """The endpoints and what they share.

    POST   /v1/metaserver                      D's reservation: 202, 409 another has this id, 410 ended, 503 full
    GET    /v1/reservations/{id}?wait_s=…      200 as soon as it is known, 404 after `wait_s`, 410 ended, and why
    DELETE /v1/reservations/{id}?reason=…      200; it, and any later copy of its post, ends
    POST   /v1/engines                         an engine's heartbeat: 200
    GET    /v1/engines?role=…                  live engines
    DELETE /v1/engines/{id}?epoch=…            an engine says goodbye: 200, 404 when another life is registered
    GET    /health, /metrics                   without signature
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._engines = EngineStore(settings.max_engines)
        self._metrics = Metrics()
        self.rendezvous = Rendezvous(
            ReservationStore(settings.max_reservations, settings.max_bytes), settings.max_waits, clock
        )

    def routes(self) -> list[Route]:
        """All routes, to be mounted at the root."""
        gate = Gate(self.settings, self._metrics)
        one = "/v1/reservations/{transfer_id}"
        return [
            Route("/v1/metaserver", gate(self._post_reservation), methods=["POST"]),
            Route(one, gate(self._get_reservation), methods=["GET"]),
            Route(one, gate(self._delete_reservation), methods=["DELETE"]),
            Route("/v1/engines", gate(self._post_engine), methods=["POST"]),
            Route("/v1/engines", gate(self._get_engines), methods=["GET"]),
            Route("/v1/engines/{engine_id}", gate(self._delete_engine), methods=["DELETE"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._show_metrics, methods=["GET"]),
        ]

    async def _post_reservation(self, request: Request, body: bytes) -> Response:
        try:
            reservation = parse_reservation(body)
        except RemoteProtocolError as error:
            raise invalid(error) from error
        outcome = self.rendezvous.post(reservation, len(body))
        self._metrics.posts.labels(outcome.value).inc()
        if outcome is PostOutcome.CONFLICT:
            raise RefusedError(
                409, f"another reservation has transfer_id {reservation.transfer_id}", "transfer_id"
            )
        if outcome is PostOutcome.ENDED:
            ended = self.rendezvous.store.find(reservation.transfer_id, self._clock())
            raise _gone(reservation.transfer_id, ended if isinstance(ended, Ended) else Ended("forgotten"))
        if outcome is PostOutcome.FULL:
            raise RefusedError(503, "the metaserver is full of reservations", retry_after_s=1)
        return json_response({"transfer_id": reservation.transfer_id, "outcome": outcome.value}, 202)

    async def _get_reservation(self, request: Request, body: bytes) -> Response:
        transfer_id = _transfer_id(request)
        wait_s = float_parameter(request, "wait_s", 0.0, self.settings.max_wait_s)
        begun = self._clock()
        try:
            found = await self.rendezvous.wait(transfer_id, wait_s)
        except TooManyWaitsError:
            self._metrics.lookups.labels("refused").inc()
            raise RefusedError(503, "too many requests are waiting for reservations", retry_after_s=1) from None
        if isinstance(found, Reservation):
            self._metrics.lookups.labels("found").inc()
            self._metrics.lookup_seconds.observe(self._clock() - begun)
            return json_response(found)
        if isinstance(found, Ended):
            self._metrics.lookups.labels("ended").inc()
            raise _gone(transfer_id, found)
        self._metrics.lookups.labels("unknown").inc()
        raise RefusedError(404, f"no reservation with transfer_id {transfer_id} yet", "transfer_id")

    async def _delete_reservation(self, request: Request, body: bytes) -> Response:
        reason = request.query_params.get("reason") or "released"
        released = self.rendezvous.release(_transfer_id(request), reason[:_MAX_REASON_CHARS])
        return json_response({"released": released})

    async def _post_engine(self, request: Request, body: bytes) -> Response:
        try:
            entry = parse_engine_entry(body)
        except RemoteProtocolError as error:
            raise invalid(error) from error
        outcome = self._engines.post(entry, self._clock())
        if outcome is PostOutcome.FULL:
            raise RefusedError(503, "the metaserver is full of engines", retry_after_s=1)
        return json_response({"engine_id": entry.engine_id, "outcome": outcome.value})

    async def _get_engines(self, request: Request, body: bytes) -> Response:
        role = request.query_params.get("role", "")
        if role and role not in _ROLES:
            raise RefusedError(422, f"role is {role[:64]!r}, expected one of {', '.join(_ROLES)}", "role")
        return json_response({"engines": self._engines.live(self._clock(), role)})

    async def _delete_engine(self, request: Request, body: bytes) -> Response:
        engine_id = request.path_params["engine_id"]
        if not self._engines.remove(engine_id, request.query_params.get("epoch", "")):
            raise RefusedError(404, f"no engine {engine_id[:64]!r} of this epoch", "epoch")
        return json_response({"removed": True})

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok", "wire_version": WIRE_VERSION})

    async def _show_metrics(self, request: Request) -> Response:
        now = self._clock()
        store = self.rendezvous.store
        store.expire(now)
        self._metrics.reservations.set(len(store))
        self._metrics.reservation_bytes.set(store.num_bytes)
        self._metrics.expired.set(store.num_expired)
        self._metrics.waits.set(self.rendezvous.num_waits)
        for role in _ROLES:
            self._metrics.engines.labels(role).set(len(self._engines.live(now, role)))
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def create_app(settings: Settings) -> Starlette:
    """The app; `app.state.metaserver` is its `Metaserver`."""
    metaserver = Metaserver(settings)
    app = Starlette(routes=metaserver.routes())
    app.state.metaserver = metaserver
    return app


def _transfer_id(request: Request) -> str:
    transfer_id: str = request.path_params["transfer_id"]
    if not _TRANSFER_ID.fullmatch(transfer_id):
        raise RefusedError(
            422,
            f"transfer_id {transfer_id[:64]!r}: expected 1 to 128 letters, digits, '.', '_', '-'",
            "transfer_id",
        )
    return transfer_id


def _gone(transfer_id: str, ended: Ended) -> RefusedError:
    return RefusedError(410, f"reservation {transfer_id} has ended: {ended.reason}", "transfer_id")
