"""From a cluster and this host (or facts saved elsewhere) to findings."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from ascend_pd.check.finding import Finding
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.gather import Probe, gather, replica_here
from ascend_pd.check.host.rules import HOST_RULES
from ascend_pd.check.host.rules.versions import image
from ascend_pd.check.subject import Subject
from ascend_pd.errors import OperatorError


def judge_host(subject: Subject, facts: HostFacts) -> list[Finding]:
    """All findings of all host rules.

    Raises:
        OperatorError: the facts are of a pool that the file does not have.
    """
    pool = next((p for p in subject.pools if p.name == facts.pool), None)
    if pool is None:
        names = ", ".join(p.name for p in subject.pools)
        raise OperatorError(f"no pool {facts.pool!r} in the cluster file", f"--pool is one of {names}")
    return [finding for rule in HOST_RULES.values() for finding in rule.check(subject, pool, facts)]


def host_findings(subject: Subject, args: argparse.Namespace) -> tuple[list[Finding], dict[str, str]]:
    """Judge saved facts, or gather and judge this host's; and what its image has (component → version).

    Raises:
        OperatorError: it cannot be told which replica this is; facts that cannot be read or written.
    """
    facts = _read(Path(args.facts)) if args.facts else _gather(subject, args)
    if args.save_facts:
        try:
            Path(args.save_facts).write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
        except OSError as error:
            raise OperatorError(f"{args.save_facts}: {error.strerror}", "choose another file") from error
    findings = judge_host(subject, facts)
    (pool,) = [p for p in subject.pools if p.name == facts.pool]
    return findings, image(pool, facts)


def _gather(subject: Subject, args: argparse.Namespace) -> HostFacts:
    replica = replica_here(subject, args.pool, args.replica)
    if replica is None:
        names = ", ".join(f"{p.name} (replicas 0-{p.spec.replicas - 1})" for p in subject.pools)
        what = f"no replica {args.replica} of pool {args.pool!r}" if args.pool else "this host is in no pool"
        raise OperatorError(what, f"say --pool and --replica: {names}")
    return gather(subject, replica, Probe(node=args.node, peers=tuple(args.peer)))


def _read(path: Path) -> HostFacts:
    try:
        return msgspec.json.decode(path.read_bytes(), type=HostFacts)
    except OSError as error:
        raise OperatorError(f"{path}: {error.strerror}", "name a file written with --save-facts") from error
    except msgspec.DecodeError as error:
        raise OperatorError(
            f"{path}: not saved facts: {error}", "name a file written with --save-facts"
        ) from error
