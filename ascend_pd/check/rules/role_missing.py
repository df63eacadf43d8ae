"""There is nobody to prefill or nobody to decode.

A cluster needs at least one prefill and one decode pool, or a union pool that does both. Pool names must also
differ: engine ids, log files and Kubernetes objects are named after them.

Fix: add the missing pool.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Subject
from ascend_pd.spec.cluster import Role

NAME = "role-missing"
SEVERITY = "error"
ZH = """没有人做 prefill，或没有人做 decode。

集群至少要有一个 prefill 池和一个 decode 池，或一个两者都做的 union 池。池名也不得重复：引擎标识、日志文件与
Kubernetes 对象都以它命名。

处理：补上缺少的池。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """Roles present, names distinct."""
    roles = {pool.spec.role for pool in subject.pools}
    if Role.UNION not in roles:
        for role in (Role.PREFILL, Role.DECODE):
            if role not in roles:
                yield error(
                    NAME, "$.spec.pools", f"no {role} pool and no union pool", f"add a pool with role: {role}"
                )
    seen: dict[str, int] = {}
    for pool in subject.pools:
        if (first := seen.setdefault(pool.name, pool.index)) != pool.index:
            yield error(
                NAME, f"{pool.path}.name", f"pool {first} is called {pool.name!r} too", "rename one of them"
            )
