"""Whatever happens to P, D or the client: an answer is the right one or a clear error in time, nothing stays held."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.chaos_record import ChaosRecord
from tests.e2e.cluster import Cluster, cpu_spec, running, wait_empty
from tests.e2e.load import Load, Outcome, Prompt, ask, ask_and_leave, handoff_of, prompt_of

LEASE_S, TRANSFER_S, QUARANTINE_S = 6.0, 25.0, 5.0
STEP_S = 6.0
"""One engine step and the poll of its metrics, on a busy machine with two cores."""
EMPTY_S = LEASE_S + 2.0 + STEP_S
ERROR_S = TRANSFER_S + QUARANTINE_S + 2 * STEP_S
ROUNDS = int(os.environ.get("ASCEND_PD_CHAOS_ROUNDS", "1"))
DECODE_LEN = 1536
"""Shorter than what prefill accepts."""
LENGTHS = (40, 127, 128, 300, 640, 1100)

pytestmark = pytest.mark.parametrize("round_number", range(ROUNDS))


@pytest.fixture(scope="module")
def record() -> Iterator[ChaosRecord]:
    found = ChaosRecord()
    yield found
    found.write()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return [prompt_of(length, 500 + length) for length in LENGTHS]


@pytest.fixture(scope="module")
def right(collocated: str, prompts: list[Prompt]) -> dict[Prompt, set[tuple[int, ...]]]:
    """What the collocated engine says, alone and in a batch."""
    alone = [ask(collocated, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        batched = list(pool.map(lambda prompt: ask(collocated, prompt), prompts))
    assert all(outcome.answered for outcome in (*alone, *batched))
    return {one.prompt: {one.tokens, other.tokens} for one, other in zip(alone, batched, strict=True)}


@pytest.fixture(scope="module", params=("pull", "layerwise"))
def chaos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with short leases, in which some messages are lost and repeated from the start."""
    bounds = {"leaseSeconds": LEASE_S, "transferSeconds": TRANSFER_S, "quarantineSeconds": QUARANTINE_S}
    document = cpu_spec(request.param, connector=bounds)
    document["spec"]["pools"][1]["overrides"] = {"maxModelLen": DECODE_LEN}
    cluster = Cluster(document, tmp_path_factory.mktemp(f"chaos-{request.param}"))
    lossy = "drop:done:2,repeat:done:3,drop:claim:2,repeat:claim:2,drop:pushed:2,repeat:pushed:3,drop:answer:4"
    for name in ("prefill/0", "decode/0"):
        cluster[name].env = {"ASCEND_PD_FAULTS": lossy}
    with running(cluster):
        yield cluster


@pytest.fixture
def settled(
    chaos: Cluster, record: ChaosRecord, right: dict[Prompt, set[tuple[int, ...]]], round_number: int
) -> Iterator[None]:
    """After each test: nothing held on either side, and a fresh request is answered rightly."""
    yield
    for name in ("prefill/0", "decode/0"):
        record.emptied(wait_empty(chaos[name], EMPTY_S))
    for prompt in list(right)[:2]:
        fresh = ask(chaos.proxy.url, prompt)
        assert fresh.tokens in right[prompt], f"{fresh.status} {fresh.error}"


def judge(outcomes: list[Outcome], right: dict[Prompt, set[tuple[int, ...]]], record: ChaosRecord) -> None:
    """Every answer is the collocated engine's, or a clear error inside its deadline."""
    record.asked(outcomes)
    for outcome in outcomes:
        if outcome.answered:
            assert outcome.tokens in right.get(outcome.prompt, ()), f"wrong text for {len(outcome.prompt)} tokens"
        elif not outcome.cut:
            assert outcome.error, "an error without a reason"
            assert outcome.seconds < ERROR_S, f"{outcome.error} only after {outcome.seconds:.1f} s"


Right = dict[Prompt, set[tuple[int, ...]]]


@pytest.mark.usefixtures("settled")
def test_lost_and_repeated_messages_change_nothing(
    chaos: Cluster, prompts: list[Prompt], right: Right, record: ChaosRecord
) -> None:
    outcomes = Load(chaos.proxy.url, prompts * 2, at_a_time=3).outcomes()
    judge(outcomes, right, record)
    assert all(outcome.answered for outcome in outcomes), [o.error for o in outcomes if o.error]


@pytest.mark.usefixtures("settled")
def test_random_cancels_strand_nothing(
    chaos: Cluster, prompts: list[Prompt], right: Right, record: ChaosRecord
) -> None:
    dice = random.Random(20_261_130)

    def one(_: int) -> Outcome:
        prompt = dice.choice(prompts[:5])
        if dice.random() < 0.75:
            return ask_and_leave(chaos.proxy.url, prompt, dice.uniform(0.0, 2.0), stream=dice.random() < 0.5)
        return ask(chaos.proxy.url, prompt)

    with ThreadPoolExecutor(8) as pool:
        judge(list(pool.map(one, range(200))), right, record)


@pytest.mark.parametrize("chaos", ["pull"], indirect=True)
@pytest.mark.usefixtures("settled")
def test_client_gone_between_prefills_answer_and_decodes_admission(
    chaos: Cluster, prompts: list[Prompt], record: ChaosRecord
) -> None:
    for prompt in prompts[:3]:
        params = {"do_remote_decode": True, "transfer_id": str(uuid.uuid4())}
        assert handoff_of(chaos["prefill/0"].url, prompt, params)["do_remote_prefill"]
    record.fault("client gone after prefill")


@pytest.mark.usefixtures("settled")
def test_decode_refuses_what_prefill_accepted(chaos: Cluster, right: Right, record: ChaosRecord) -> None:
    outcome = ask(chaos.proxy.url, prompt_of(DECODE_LEN + 100, 9))
    judge([outcome], right, record)
    assert outcome.status == 400, outcome
    assert outcome.seconds < ERROR_S


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("name", ["prefill/0", "decode/0"])
def test_engine_killed_under_load_and_restarted_under_the_same_name(
    chaos: Cluster, prompts: list[Prompt], right: Right, record: ChaosRecord, name: str
) -> None:
    load = Load(chaos.proxy.url, prompts * 3, at_a_time=4)
    time.sleep(3.0)
    chaos[name].kill()
    record.fault(f"kill -9 {name}")
    judge(load.outcomes(), right, record)
    chaos[name].start()
    chaos.wait_ready()
    wait_until_served(chaos, prompts[0])


@pytest.mark.parametrize("chaos", ["pull"], indirect=True)
@pytest.mark.usefixtures("settled")
def test_prefill_stopped_past_the_lease_during_a_read(
    chaos: Cluster, prompts: list[Prompt], right: Right, record: ChaosRecord
) -> None:
    prompt = prompts[-1]
    params = {"do_remote_decode": True, "transfer_id": str(uuid.uuid4())}
    handoff = handoff_of(chaos["prefill/0"].url, prompt, params)
    chaos["prefill/0"].signal_all(signal.SIGSTOP)
    record.fault("SIGSTOP prefill before a read")
    try:
        outcome = ask(chaos["decode/0"].url, prompt, params=handoff)
    finally:
        chaos["prefill/0"].signal_all(signal.SIGCONT)
    judge([outcome], right, record)
    wait_until_served(chaos, prompts[0])


@pytest.mark.parametrize("chaos", ["layerwise"], indirect=True)
@pytest.mark.usefixtures("settled")
def test_bytes_of_a_push_given_up_never_reach_reused_blocks(
    chaos: Cluster, prompts: list[Prompt], right: Right, record: ChaosRecord
) -> None:
    decode = chaos["decode/0"].url
    with ThreadPoolExecutor(1) as pool:
        victim = pool.submit(ask, chaos.proxy.url, prompt_of(1400, 77))
        time.sleep(2.0)
        chaos["prefill/0"].signal_all(signal.SIGSTOP)
        record.fault("SIGSTOP prefill in the middle of a push")
        try:
            outcome = victim.result(ERROR_S + 30)
            wait_empty(chaos["decode/0"], EMPTY_S)
            # D computes these by itself, in the very blocks that the push was writing to.
            before = [ask(decode, prompt) for prompt in prompts]
        finally:
            chaos["prefill/0"].signal_all(signal.SIGCONT)
    judge([outcome], {**right, outcome.prompt: {outcome.tokens}}, record)
    wait_empty(chaos["prefill/0"], ERROR_S)
    after = [ask(decode, prompt) for prompt in prompts]  # from D's prefix cache: the bytes in those blocks
    judge([*before, *after], right, record)
    assert all(outcome.answered for outcome in (*before, *after))
    wait_until_served(chaos, prompts[0])


@pytest.mark.parametrize("chaos", ["layerwise"], indirect=True)
@pytest.mark.usefixtures("settled")
def test_metaserver_killed_and_restarted(
    chaos: Cluster, prompts: list[Prompt], right: Right, record: ChaosRecord
) -> None:
    load = Load(chaos.proxy.url, prompts * 2, at_a_time=3)
    time.sleep(1.0)
    chaos["metaserver"].kill()
    record.fault("kill -9 metaserver")
    time.sleep(1.0)
    chaos["metaserver"].start()
    judge(load.outcomes(), right, record)
    chaos.wait_ready()


def wait_until_served(chaos: Cluster, prompt: Prompt, timeout_s: float = 60.0) -> None:
    """Until the proxy has noticed that its engines are well again."""
    deadline = time.monotonic() + timeout_s
    while not (outcome := ask(chaos.proxy.url, prompt)).answered:
        assert time.monotonic() < deadline, outcome.error
        time.sleep(1.0)
