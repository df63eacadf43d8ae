from __future__ import annotations

from typing import get_args

from ascend_pd.spec.cluster import PolicyName
from proxy.policy import POLICIES


def test_the_file_knows_exactly_the_proxys_policies() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)
