"""TLS on both sides of the proxy."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from proxy.app import create_app
from proxy.settings import InstanceSettings, ListenerSettings, ProbeSettings, Settings
from tests.unit.proxy.conftest import chat_body, serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)),
        ],
        check=True,
        capture_output=True,
    )
    return str(certificate), str(key)


@pytest.mark.parametrize("trusted", [True, False])
async def test_engines_over_https_are_verified_and_clients_served_over_tls(
    pair: tuple[str, str], trusted: bool
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"served": True})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    engine_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    engine_tls.load_cert_chain(*pair)
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=engine_tls)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    settings = Settings(
        union=(InstanceSettings(url=f"https://127.0.0.1:{port}"),),
        probes=ProbeSettings(interval_s=0),
        retries=0,
        listener=ListenerSettings(tls_certificate=pair[0], tls_key=pair[1], engine_ca=pair[0] if trusted else ""),
    )
    client_tls = ssl.create_default_context(cafile=pair[0])
    async with serving(settings, create_app(settings)) as proxy, aiohttp.ClientSession() as client:
        url = f"https://127.0.0.1:{proxy}/v1/chat/completions"
        async with client.post(url, json=chat_body(), ssl=client_tls) as found:
            assert found.status == (200 if trusted else 502)
            if trusted:
                assert await found.json() == {"served": True}
    await runner.cleanup()
