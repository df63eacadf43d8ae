"""The protocol page names everything that is on the wire, in both languages."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from ascend_pd.wire import WIRE_VERSION, messages
from ascend_pd.wire.frames import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, FrameKind
from ascend_pd.wire.http_signature import NONCE_HEADER, SIGNATURE_HEADER
from connectors.handoff.source import SourceLimits
from connectors.sidechannel.client import _FIRST_REPEAT_S, _LONGEST_REPEAT_S
from metaserver.app import create_app
from metaserver.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = {language: (ROOT / "docs" / language / "protocol.md").read_text("utf-8") for language in ("en", "zh")}
page = pytest.mark.parametrize("text", PAGES.values(), ids=PAGES.keys())


@page
def test_every_message_has_a_row_and_every_row_a_message(text: str) -> None:
    rows = set(re.findall(r"^\| `([a-z_]+)` \|(?:[^|\n]*\|){5}$", text, re.MULTILINE))
    assert rows == {kind.__struct_config__.tag for kind in typing.get_args(messages.Request)}
    for kind in typing.get_args(messages.Reply):
        tag = kind.__struct_config__.tag
        assert tag == "answer" or f"`{tag}`" in text


@page
def test_every_verdict_is_explained(text: str) -> None:
    for verdict in messages.Verdict:
        assert re.search(rf"^\| `{verdict}` \|", text, re.MULTILINE)


@page
def test_every_counter_of_dropped_frames_is_explained(text: str) -> None:
    for flaw in ("foreign", "foreign_version", "bad_mac", "malformed"):
        assert re.search(rf"^\| `{flaw}` \|", text, re.MULTILINE)


@page
def test_every_route_of_the_metaserver_is_there(text: str) -> None:
    for route in create_app(Settings()).state.metaserver.routes():
        for method in route.methods - {"HEAD"}:
            path = re.escape(route.path).replace("engine_id", "(engine_)?id")
            assert re.search(rf"`{method} {path}[`?]", text), f"{method} {route.path}"


@page
def test_figures_are_those_of_the_code(text: str) -> None:
    settings = Settings()
    for figure in (
        f"**{WIRE_VERSION}**",
        f"{MAX_REQUEST_BYTES >> 20} MiB",
        f"{MAX_REPLY_BYTES >> 20} MiB",
        f"{_FIRST_REPEAT_S:g} s",
        f"{_LONGEST_REPEAT_S:g} s",
        f"{settings.max_reservations // 1000} {settings.max_reservations % 1000}",
        f"{settings.max_bytes >> 20} MiB",
        f"{settings.max_body_bytes >> 20} MiB",
        f"{settings.max_wait_s:g}",
        str(SourceLimits().max_tombstones),
        NONCE_HEADER,
        SIGNATURE_HEADER,
    ):
        assert figure in text, figure
    for kind in FrameKind:
        assert re.search(rf"{kind.value} ({kind.name.lower()}|请求|应答|通知)", text)


def test_both_languages_have_the_same_structure() -> None:
    shapes = [re.findall(r"^(#+|\||\*|```)", text, re.MULTILINE) for text in PAGES.values()]
    assert shapes[0] == shapes[1]
