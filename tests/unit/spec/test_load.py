from __future__ import annotations

import os
from pathlib import Path

import pytest

from ascend_pd.spec.load import load_spec
from ascend_pd.spec.problems import SpecError
from tests.unit.spec.test_parse import GOOD


def refused(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert not caught.value.is_cluster
    assert caught.value.message.startswith(f"{path}: ")
    return caught.value.message.removeprefix(f"{path}: ")


def test_a_good_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(GOOD, encoding="utf-8-sig")
    assert load_spec(path).metadata.name == "small"


def test_a_missing_file_a_directory_and_a_pipe_are_told_apart(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.yaml") == "no such file"
    assert refused(tmp_path) == "not a regular file"
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "a pipe, which can be read only once"


def test_a_hundred_megabytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as stream:
        stream.truncate(100 << 20)
    assert refused(path) == "larger than 1 MiB"


def test_binary_junk_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "junk"
    path.write_bytes(bytes(range(256)) * 10)
    assert refused(path) == "not UTF-8 text (byte 128)"


def test_the_message_of_a_wrong_file_has_name_line_path_and_count(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace("role: decode", "role: x").replace("port: 8200", "port: y"))
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value).startswith(f"{path}: line 15, $.spec.pools[1].role: must be one of")
    assert "(and 1 more)" in str(caught.value)
