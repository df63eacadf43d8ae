"""What a hostile client may try."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proxy import bounded_http
from proxy.__main__ import main
from proxy.auth import parse_keys
from proxy.load import load_settings
from proxy.services import Secrets
from tests.unit.proxy.conftest import Stack, chat_body

ROOT = Path(__file__).resolve().parents[3]


async def raw(stack: Stack, *pieces: bytes) -> bytes:
    port = int(stack.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(5):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_endless_headers_are_cut_off(stack: Stack) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    answer = await raw(stack, head, *(b"x-%d: %s\r\n" % (n, b"y" * 8000) for n in range(40)))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
    assert (await stack.chat())[0] == 200


async def test_a_head_that_never_ends_is_given_up(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_S", 0.1)
    assert await raw(stack, b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n") == b""


async def test_a_long_body_after_a_short_head_is_no_long_head(stack: Stack) -> None:
    body = chat_body(messages=[{"role": "user", "content": "x" * 300_000}])
    assert (await stack.post("/v1/chat/completions", body))[0] == 200


@pytest.mark.parametrize("depth", [*range(100, 1100, 50), 100_000])
async def test_deep_nesting_is_a_400_or_passed_on_but_never_a_crash(stack: Stack, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    messages = b'[{"role":"user","content":%s}]' % deep
    for fields in (b'"messages":[],"x":' + deep, b'"messages":' + messages, b'"messages":[],"n":2,"x":' + deep):
        status, answer = await stack.post("/v1/chat/completions", b'{"model":"fake",%s}' % fields)
        assert status in (200, 400)
        assert "error" in json.loads(answer) or status == 200
    for path, field in (
        ("/v1/responses", b"input"),
        ("/v1/messages", b"messages"),
        ("/v1/completions", b"prompt"),
    ):
        status, answer = await stack.post(path, b'{"model":"fake","%s":%s}' % (field, deep))
        assert status in (200, 400)
        assert "error" in json.loads(answer) or status == 200
    assert (await stack.chat())[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"fake","messages":[],"\\u006bv_transfer_params":{"do_remote_prefill":true}}',
        b'{"model":"fake","kv_transfer_params":1,"messages":[],"kv_transfer_params":null}',
        b'{"model":"fake","messages":[],"vllm_xargs":{"kv_transfer\\u005fparams":"x"}}',
    ],
)
async def test_transfer_params_cannot_be_hidden_by_spelling(stack: Stack, body: bytes) -> None:
    assert (await stack.post("/v1/chat/completions", body))[0] == 400
    assert not stack.prefill[0].seen


async def test_a_request_cannot_name_an_engine(stack: Stack) -> None:
    for path in ("/v1/../admin", "/v1/%2e%2e/health", "//evil/v1/models"):
        status, _ = await stack.post(path, {})
        assert status in (400, 404, 405, 501)


async def test_a_request_id_is_passed_on_only_when_it_is_one(stack: Stack) -> None:
    await stack.post("/v1/chat/completions", chat_body(), **{"x-request-id": "abc-1"})
    await stack.post("/v1/chat/completions", chat_body(), **{"x-request-id": "a b\tc<script>"})
    ids = [{k.lower(): v for k, v in s.headers.items()}["x-request-id"] for s in stack.decode[0].seen]
    assert ids[0] == "abc-1"
    assert ids[1].isalnum()


def test_secrets_do_not_show_in_their_text() -> None:
    secrets = Secrets(side_channel=b"s" * 32, keys=parse_keys("a " + "0" * 64, "f"), engine_key="engine")
    for hidden in ("ssss", "0000", "engine'"):
        assert hidden not in repr(secrets)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no instances"),
        (["--prefill", "http://a:1"], "together"),
        (["--prefill", "a:1", "--decode", "http://b:2"], "not http"),
        (["--union", "http://a:1", "--settings", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--union", "http://a:1", "--set", "no_such=1"], "no_such"),
        (["--union", "http://a:1", "--set", "policy.prefill=best"], "best"),
        (["--union", "http://a:1", "--api-key-file", "/nowhere.keys"], "/nowhere.keys"),
        (["--union", "http://a:1", "--tls-certificate", "/c.pem"], "TLS"),
        (["--union", "http://a:1", "--mode", "layerwise"], "metaserver"),
        (["--union", "http://a:1", "--set", "listener.admin_host=0.0.0.0", "--admin-port", "1"], "admin"),
        (["--union", "http://a:1", "--tls-certificate", "/c.pem", "--tls-key", "/k.pem"], "/c.pem"),
        (["--union", "http://a:1", "--metaserver", "http://[::1"], "metaserver"),
        (["--union", "http://a:1", "--metaserver", "http://m:70000"], "metaserver"),
        (["--union", "http://a:1", "--otlp-endpoint", "http://c:70000"], "OTLP"),
        (["--union", "http://a:1", "--host", "a" * 70], "cannot listen"),
        (["--union", "http://a:1", "--host", "a..b"], "cannot listen"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize("option", ["--port", "--admin-port", "--set=port", "--set=listener.admin_port"])
@pytest.mark.parametrize("port", ["70000", "65536", "-1", "99999999999999999999"])
def test_what_is_no_port_is_one_line_and_exit_code_2(
    option: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--union", "http://a:1", "--port", "0", f"{option}={port}"]) == 2
    error = capsys.readouterr().err
    assert "port" in error
    assert error.count("\n") == 1


def test_a_taken_port_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["--union", "http://127.0.0.1:9", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_every_example_of_a_cluster_file_configures_a_proxy() -> None:
    for example in sorted((ROOT / "deploy" / "examples").glob("*.yaml")):
        settings = load_settings(["--spec", str(example)])
        assert settings.prefill or settings.union, example


def test_a_term_signal_ends_the_process_orderly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy", "--port", "0", "--union", "http://127.0.0.1:9"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "startup complete" in line:
            break
    process.terminate()
    assert process.wait(30) == 0
    process.stderr.close()


async def test_the_log_of_a_request_has_no_prompt_and_no_key(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await stack.post("/v1/chat/completions", chat_body(), authorization="Bearer apd-very-secret")
    assert "apd-very-secret" not in caplog.text
    assert "capital of France" not in caplog.text
