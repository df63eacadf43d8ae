from __future__ import annotations

import pytest

from ascend_pd.spec.parse import parse_spec
from ascend_pd.spec.problems import SpecError
from tests.unit.spec.texts import cluster_data, pool, text_of

GOOD = """\
apiVersion: ascend-pd/v1
kind: PDCluster
metadata: {name: small}
spec:
  model:
    path: smollm2
    maxModelLen: 2048
  connector: {protocol: tcp}
  pools:
    - name: prefill
      role: prefill
      hardware: cpu
      port: 8100
    - name: decode
      role: decode
      hardware: cpu
      port: 8200
"""


def problems_of(text: str) -> list[tuple[str, int, str, str]]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert caught.value.is_cluster
    return [(p.path, p.line, p.message, p.fix) for p in caught.value.problems]


def unusable(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert not caught.value.is_cluster
    return caught.value.message


def test_a_good_file_is_read_with_defaults_and_lines() -> None:
    parsed = parse_spec(GOOD)
    assert parsed.cluster.spec.pools[1].port == 8200
    assert parsed.cluster.spec.engine.block_size == 128
    assert parsed.document.line_of(("spec", "pools", 1, "port")) == 17
    assert parsed.document.line_of(("spec", "pools", 1, "parallel", "tp")) == 14


def test_an_unknown_key_names_its_line_and_the_nearest_key() -> None:
    assert problems_of(GOOD.replace("maxModelLen", "maxModelLength").replace("port: 8200", "ports: 8200")) == [
        ("$.spec.model.maxModelLen", 5, "maxModelLen is required and missing", "add maxModelLen"),
        ("$.spec.model.maxModelLength", 7, "unknown key maxModelLength", "did you mean maxModelLen?"),
        ("$.spec.pools[1].port", 14, "port is required and missing", "add port"),
        ("$.spec.pools[1].ports", 17, "unknown key ports", "did you mean port?"),
    ]


def test_a_key_in_the_wrong_place_is_told_where_it_belongs() -> None:
    ((path, line, message, fix),) = problems_of(GOOD.replace("    path:", "    leaseSeconds: 3\n    path:"))
    assert (path, line, message) == ("$.spec.model.leaseSeconds", 6, "unknown key leaseSeconds")
    assert fix == "leaseSeconds belongs in $.spec.connector"


@pytest.mark.parametrize(
    ("old", "new", "message", "fix"),
    [
        ("port: 8100", "port: '8100'", "must be a whole number, not '8100'", ""),
        ("port: 8100", "port: 8100.5", "must be a whole number, not 8100.5", ""),
        ("port: 8100", "port: true", "must be a whole number, not True", ""),
        ("port: 8100", "port:", "must be a whole number, not nothing", ""),
        ("port: 8100", "port: 0", "must be at least 1, not 0", ""),
        ("name: prefill", "name: 12", "must be text, not 12", "put it in quotes"),
        (
            "role: prefill",
            "role: prefil",
            "must be one of prefill, decode, union, not 'prefil'",
            "did you mean prefill?",
        ),
        (
            "hardware: cpu\n      port: 8100",
            "hardware: {}\n      port: 8100",
            "must be one of A2, A3, cpu, not a mapping",
            "",
        ),
    ],
)
def test_a_wrong_value_says_what_is_expected(old: str, new: str, message: str, fix: str) -> None:
    ((_, _, got, got_fix),) = problems_of(GOOD.replace(old, new, 1))
    assert (got, got_fix) == (message, fix)


def test_wrong_pools_are_not_also_called_missing() -> None:
    found = problems_of(GOOD.replace("role: prefill", "role: x").replace("role: decode", "role: y"))
    assert [path for path, *_ in found] == ["$.spec.pools[0].role", "$.spec.pools[1].role"]


def test_no_pools_and_too_many_devices_are_told_for_the_whole() -> None:
    ((_, _, message, fix),) = problems_of(text_of(cluster_data(pools=[])))
    assert (message, fix) == ("pools is empty", "add a prefill and a decode pool, or a union pool")
    large = {"parallel": {"tp": 16, "dp": 4096}, "replicas": 4096}
    data = cluster_data(pool("p", "prefill", 8100, **large), pool("d", "decode", 8200))
    ((_, _, message, _),) = problems_of(text_of(data))
    assert message == "pools take 268435457 devices in all, 65536 at most"


def test_versions_must_be_text_because_9_10_is_not_9_1() -> None:
    data = cluster_data(engine={"versions": {"cann": 9.1}})
    ((path, _, message, fix),) = problems_of(text_of(data))
    assert (path, message, fix) == ("$.spec.engine.versions.cann", "must be text, not 9.1", "put it in quotes")


def test_yes_is_text_and_therefore_no_boolean() -> None:
    ((_, _, message, _),) = problems_of(GOOD.replace("port: 8100", "port: 8100\n      parallel: {ep: yes}"))
    assert message == "must be true or false, not 'yes'"


def test_a_repeated_key_is_refused_with_both_lines() -> None:
    found = problems_of(GOOD.replace("port: 8100", "port: 8100\n      port: 8101"))
    assert found == [("$.spec.pools[0].port", 14, "port is given twice, first at line 13", "keep one of them")]


def test_anchors_aliases_and_tags_are_refused_where_they_stand() -> None:
    text = (
        GOOD.replace("port: 8100", "port: &p 8100").replace("port: 8200", "port: *p").replace("2048", "!!int 2048")
    )
    lines = [(line, message) for _, line, message, _ in problems_of(text)]
    assert (13, "anchor &p is not supported") in lines
    assert (17, "alias *p is not supported") in lines
    assert (7, "tag tag:yaml.org,2002:int is not supported") in lines


def test_an_environment_variable_name_is_checked() -> None:
    ((path, _, message, _),) = problems_of(text_of(cluster_data(engine={"env": {"A-B": "1"}})))
    assert (path, message) == ("$.spec.engine.env.A-B", "'A-B' is not a variable name")


def test_a_billion_laughs_is_answered_at_once() -> None:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n"
    for this, last in zip("bcdefghij", "abcdefghi", strict=True):
        bomb += f"{this}: &{this} [{','.join(['*' + last] * 9)}]\n"
    messages = [message for *_, message, _ in problems_of(GOOD + bomb)]
    assert "alias *a is not supported" in messages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("---\n", "not a PDCluster: the document is not a mapping"),
        ("- a\n", "not a PDCluster: the document is not a mapping"),
        ("just words", "not a PDCluster: the document is not a mapping"),
        (GOOD + "---\n" + GOOD, "a second document starts at line 18"),
        ("a: [1, 2", "not YAML: line 2, column 1: did not find expected ',' or ']'"),
        ("a:\n\t- b", "not YAML: line 2, column 1: found character that cannot start any token"),
        ("\x00\x01\x02", "not text: "),
        ("[" * 500, "line 1 is nested deeper than 32 levels"),
        ("[" * 500_000, "not YAML: line 1, column "),
        ("{[a]: b}", "line 1: a key must be plain text"),
        (
            "kind: Deployment\napiVersion: apps/v1",
            "not a PDCluster: kind is 'Deployment', apiVersion is 'apps/v1'",
        ),
        ("kind: PdCluster\napiVersion: ascend-pd/v1", "kind is 'PdCluster', not PDCluster"),
        (GOOD.replace("/v1", "/v2"), "apiVersion is 'ascend-pd/v2', this version reads ascend-pd/v1"),
    ],
)
def test_what_is_no_cluster_file_gets_one_clear_line(text: str, message: str) -> None:
    assert unusable(text).startswith(message)
