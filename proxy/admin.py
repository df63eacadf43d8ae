"""The administrators' own listener: look at instances, add, drain and remove them, read the cluster file again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from msgspec import UNSET, UnsetType

from ascend_pd.errors import OperatorError
from proxy.app import ProxyApp, add_record_route
from proxy.auth import Keyring, bearer
from proxy.errors import ProxyError
from proxy.fleet import Fleet, Instance
from proxy.load import check_dialects, checked_instance
from proxy.reload import unfollowed
from proxy.services import Secrets, Services
from proxy.settings import InstanceSettings, Role, Settings

Reload = Callable[[], Settings]


class InstanceChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One instance in an admin request."""

    role: Role
    url: str
    side: str | UnsetType = UNSET
    dp_rank: int | None = None
    dialect: str | UnsetType = UNSET

    def settings(self, known: InstanceSettings | None = None) -> InstanceSettings:
        """As settings; what is left out stays as it is known.

        Raises:
            OperatorError: not an instance.
        """
        base = known or InstanceSettings(url=self.url)
        side = base.side if isinstance(self.side, UnsetType) else self.side
        dialect = base.dialect if isinstance(self.dialect, UnsetType) else self.dialect
        return checked_instance(InstanceSettings(url=self.url, side=side, dp_rank=self.dp_rank, dialect=dialect))


def create_admin_app(app: ProxyApp, secrets: Secrets, reload: Reload | None) -> FastAPI:
    """Shares the public application's services; started after it."""
    keyring = Keyring(secrets.admin_keys)

    def guard(request: Request) -> None:
        try:
            keyring.check(bearer(request.headers.get("authorization", "").encode("latin-1"), b""))
        except ProxyError as error:
            raise HTTPException(401, "an admin key is needed") from error

    admin = FastAPI(title="ascend-pd proxy admin", dependencies=[Depends(guard)], docs_url=None, redoc_url=None)
    _add_routes(admin, app, reload)
    add_record_route(admin, app)
    return admin


async def _change(request: Request) -> InstanceChange:
    try:
        return msgspec.json.decode(await request.body(), type=InstanceChange)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"an instance is {{role, url[, side, dp_rank, dialect]}}: {error}") from error


def _known(fleet: Fleet, change: InstanceChange) -> Instance:
    found = fleet.find(change.role, Instance(change.settings(), change.role, "").key)
    if found is None:
        raise HTTPException(404, f"no {change.role} instance {change.url}")
    return found


async def _follow(services: Services, read: Settings) -> dict[str, list[str]]:
    """Make the instances those of the files; new ones are probed before they get work.

    Raises:
        HTTPException: 409, the files describe another proxy than this one; nothing was changed.
    """
    other = unfollowed(services.settings, read)
    if other.firm:
        raise HTTPException(
            409,
            f"the files differ from this process in {', '.join(other.firm)}, which cannot change while it serves; "
            "nothing was changed - put that back, or restart the proxy (and, for the mode or a secret, the engines)",
        )
    differences = services.fleet.differences(read)
    await asyncio.gather(*(services.probes.first(i) for i in (*differences.added, *differences.changed)))
    services.fleet.follow(differences)
    return {
        "added": [i.key for i in differences.added],
        "changed": [i.key for i in differences.changed],
        "removed": [i.key for i in differences.removed],
        "needs_restart": list(other.deferred),
    }


def _add_routes(admin: FastAPI, app: ProxyApp, reload: Reload | None) -> None:
    changing = asyncio.Lock()
    """One change at a time: each looks, waits for probes and then acts."""

    @admin.exception_handler(OperatorError)
    async def refuse(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    @admin.get("/instances")
    async def instances() -> JSONResponse:
        """All instances and how they are."""
        return JSONResponse({"instances": [view(i, app.services.now()) for i in app.services.fleet.instances()]})

    @admin.post("/instances")
    async def add(request: Request) -> JSONResponse:
        """Take an instance in, or back if it is draining; a known one that is told otherwise is replaced."""
        change = await _change(request)
        key = Instance(change.settings(), change.role, "").key
        services = app.services
        async with changing:
            known = services.fleet.find(change.role, key)
            settings = change.settings(known.settings if known is not None else None)
            check_dialects(services.settings, [settings])
            fresh = services.fleet.make(settings, change.role)
            instance = known if known is not None and known.equals(fresh) else fresh
            await services.probes.first(instance)
            services.fleet.put(instance)
            instance.draining = False
        return JSONResponse(view(instance, services.now()), 201)

    @admin.post("/instances/drain")
    async def drain(request: Request) -> JSONResponse:
        """Give it no new work; what it has ends undisturbed."""
        instance = _known(app.services.fleet, await _change(request))
        instance.draining = True
        return JSONResponse(view(instance, app.services.now()))

    @admin.post("/instances/remove")
    async def remove(request: Request) -> JSONResponse:
        """Forget it; what it has ends undisturbed."""
        instance = _known(app.services.fleet, await _change(request))
        app.services.fleet.remove(instance)
        return JSONResponse(view(instance, app.services.now()))

    @admin.post("/reload")
    async def read_again() -> JSONResponse:
        """Read the files of the command line again and follow what they say about instances."""
        if reload is None:
            raise HTTPException(501, "this proxy was not started from a file")
        async with changing:
            return JSONResponse(await _follow(app.services, reload()))

    @admin.get("/metrics")
    async def metrics() -> Response:
        """As on the public listener."""
        return Response(app.services.metrics.exposition(), media_type="text/plain; version=0.0.4")


def view(instance: Instance, now: float) -> dict[str, Any]:
    """An instance as JSON."""
    identity = instance.identity
    return {
        "role": instance.role,
        "url": instance.settings.url,
        "dp_rank": instance.settings.dp_rank,
        "side": instance.settings.side,
        "dialect": instance.dialect,
        "available": instance.available(now),
        "healthy": instance.healthy,
        "draining": instance.draining,
        "breaker": instance.breaker.state(now),
        "requests": instance.requests,
        "tokens": instance.tokens,
        "engine": msgspec.to_builtins(identity.engine) if identity is not None else None,
        "fingerprint": msgspec.to_builtins(identity.fingerprint) if identity is not None else None,
    }
