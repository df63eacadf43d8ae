"""The cap on finished prefills that nobody has reserved for."""

from __future__ import annotations

from connectors.handoff.unreserved import UnreservedCap


def test_the_newest_are_dropped_until_the_rest_fits() -> None:
    cap = UnreservedCap(10)
    assert cap.add("a", 6) == []
    assert cap.add("b", 4) == []
    assert cap.add("c", 3) == ["c"]
    assert len(cap) == 2


def test_one_larger_than_the_cap_is_dropped_itself() -> None:
    cap = UnreservedCap(10)
    cap.add("a", 6)
    assert cap.add("b", 11) == ["b"]
    assert len(cap) == 1


def test_a_reserved_one_makes_room() -> None:
    cap = UnreservedCap(10)
    cap.add("a", 6)
    cap.remove("a")
    cap.remove("a")
    assert cap.add("b", 10) == []
