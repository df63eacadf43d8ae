"""Who is let in."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from proxy.admission import Admission, Overloaded
from proxy.auth import Keyring, main, parse_keys
from proxy.services import Secrets
from proxy.settings import AdmissionSettings, KeyLimits
from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import StackOf, chat_body

KEY = "apd-secret"
LINE = f"team-a {hashlib.sha256(KEY.encode()).hexdigest()}"


async def test_places_go_to_those_who_wait_in_order() -> None:
    admission = Admission(AdmissionSettings(max_running=1, max_queued=2))
    first = await admission.enter("", None)
    order: list[int] = []

    async def wait(number: int) -> None:
        place = await admission.enter("", None)
        order.append(number)
        place.leave()

    waiting = [asyncio.create_task(wait(n)) for n in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await admission.enter("", None)
    assert refused.value.status == 429
    first.leave()
    await asyncio.gather(*waiting)
    assert order == [1, 2]
    assert admission.running == 0


async def test_a_place_is_not_lost_when_its_owner_leaves_while_waiting() -> None:
    admission = Admission(AdmissionSettings(max_running=1))
    first = await admission.enter("", None)
    waiting = asyncio.create_task(admission.enter("", None))
    await asyncio.sleep(0)
    first.leave()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(1):
        (await admission.enter("", None)).leave()
    assert (admission.running, admission.queued) == (0, 0)


async def test_waiting_ends_with_503_after_the_queues_time() -> None:
    admission = Admission(AdmissionSettings(max_running=0, queue_s=0.05))
    with pytest.raises(Overloaded) as refused:
        await admission.enter("", None)
    assert (refused.value.status, admission.queued) == (503, 0)


async def test_keys_have_their_own_limits() -> None:
    admission = Admission(AdmissionSettings())
    limits = KeyLimits(max_running=1, requests_per_minute=2)
    place = await admission.enter("a", limits)
    with pytest.raises(Overloaded) as refused:
        await admission.enter("a", limits)
    assert refused.value.status == 429
    (await admission.enter("b", limits)).leave()
    place.leave()
    (await admission.enter("a", limits)).leave()
    with pytest.raises(Overloaded) as refused:
        await admission.enter("a", limits)
    assert refused.value.retry_after_s > 1


async def test_a_full_proxy_answers_with_retry_after(stack_of: StackOf) -> None:
    async with stack_of(admission=AdmissionSettings(max_running=1, max_queued=0)) as stack:
        stack.prefill[0].faults.append(Fault.HANG)
        hanging = asyncio.create_task(stack.chat())
        while not stack.prefill[0].seen:
            await asyncio.sleep(0.01)
        async with stack.http.post(stack.url + "/v1/chat/completions", json=chat_body()) as answer:
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
        hanging.cancel()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
    ],
)
async def test_only_a_known_key_is_let_in(stack_of: StackOf, headers: dict[str, str], status: int) -> None:
    async with stack_of(secrets=Secrets(keys=parse_keys(LINE, "keys"))) as stack:
        assert (await stack.post("/v1/chat/completions", chat_body(), **headers))[0] == status
        assert bool(stack.prefill[0].seen) == (status == 200)
        assert all("authorization" not in {k.lower() for k in s.headers} for s in stack.decode[0].seen)
        for path in ("/v1/models", "/metrics"):
            async with stack.http.get(stack.url + path, headers=headers) as answer:
                assert answer.status == status
        async with stack.http.get(stack.url + "/health") as answer:
            assert answer.status == 200


def test_a_made_key_opens_the_ring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    out, err = capsys.readouterr()
    key = err.split()[-1]
    found = Keyring(parse_keys(out.strip() + " max_running=3", "f")).check(key.encode())
    assert found is not None
    assert (found.name, found.limits.max_running) == ("ops", 3)
    assert key not in out


@pytest.mark.parametrize("text", ["", "a", "a zz", f"{LINE} x=1", f"{LINE}\n{LINE}", f"{LINE} max_running=-1"])
def test_a_bad_key_file_is_refused_with_its_line(text: str) -> None:
    from ascend_pd.errors import OperatorError

    with pytest.raises(OperatorError, match="keyfile"):
        parse_keys(text, "keyfile")
