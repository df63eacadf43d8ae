"""A worker's service for peers: leases of staging slots that a failed transfer made void."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from ascend_pd.errors import TransferError
from ascend_pd.layout.staging import Cells
from ascend_pd.wire.messages import Answer, Stage, StageOpen, StageReady, Verdict
from connectors.device.cpu import DONE
from connectors.transport.worker_service import WorkerService
from tests.unit.test_mover import Bench


class Service(Bench):
    """P's rank 0 serves D (pull), or D serves P's rank 0 (push)."""

    def __init__(self, *, push: bool) -> None:
        super().__init__()
        passive, active = (self.decode, self.prefill[0]) if push else (self.prefill[0], self.decode)
        self.service = WorkerService(
            self.device,
            self.transport,
            passive.layout,
            host="127.0.0.1",
            secret=b"",
            staging_bytes=1 << 20,
            idle_s=10.0,
        )
        self.opening = StageOpen(life=self.service.life, caller="me", layout=active.layout, push=push)

    def open(self, void: str = "") -> StageReady:
        ready = self.client.request(
            ("127.0.0.1", self.service.port), msgspec.structs.replace(self.opening, void=void), 5.0
        )
        assert isinstance(ready, StageReady)
        return ready

    def stage(self, token: str) -> Verdict:
        cells = Cells(strand=0, regions=(0,), units=((0, 1),))
        message = Stage(token=token, sequence=1, slot=0, choice=0, cells=cells, block_ids=((1,),))
        answer = self.client.request(("127.0.0.1", self.service.port), message, 5.0)
        assert isinstance(answer, Answer)
        return answer.verdict


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    found = Service(push=request.param)
    yield found
    found.service.close()
    found.client.close()


@pytest.mark.parametrize("service", [False, True], indirect=True, ids=["pull", "push"])
def test_the_same_caller_gets_the_same_lease(service: Service) -> None:
    assert service.open() == service.open() == service.open(void="another")


@pytest.mark.parametrize("service", [False], indirect=True, ids=["pull"])
def test_after_a_failed_read_there_is_a_new_lease_and_the_old_one_is_void(service: Service) -> None:
    former = service.open()
    present = service.open(void=former.token)
    assert present.token != former.token and present.slots == former.slots
    assert (service.stage(former.token), service.stage(present.token)) == (Verdict.GONE, Verdict.OK)
    assert service.open(void=former.token) == present


@pytest.mark.parametrize("service", [True], indirect=True, ids=["push"])
def test_slots_that_a_failed_write_may_still_reach_are_not_leased_anew_before_a_fence(service: Service) -> None:
    former = service.open()
    assert service.open(void=former.token) == former
    service.service.fenced()
    service.opening = msgspec.structs.replace(service.opening, life=service.service.life)
    assert service.open(void=former.token).token != former.token


@pytest.mark.parametrize("service", [True], indirect=True, ids=["push"])
def test_a_fence_begins_a_new_life_so_that_nobody_writes_through_a_lease_of_before(service: Service) -> None:
    former, life = service.open(), service.service.life
    service.service.fenced()
    assert service.service.life != life
    assert service.stage(former.token) is Verdict.GONE
    answer = service.client.request(("127.0.0.1", service.service.port), service.opening, 5.0)
    assert isinstance(answer, Answer) and answer.verdict is Verdict.EPOCH


class NeverDone:
    def done(self) -> bool:
        return False

    def wait(self, deadline: float) -> bool:
        return False


@pytest.mark.parametrize("service", [True], indirect=True, ids=["push"])
def test_a_scatter_that_does_not_end_keeps_the_fence_from_being_over(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = service.open().token
    with monkeypatch.context() as patch:
        patch.setattr(service.device, "copy", lambda tiles: NeverDone())
        assert service.stage(token) is Verdict.REFUSED
    assert service.stage(token) is Verdict.GONE, "a repeat would write a second time"
    with pytest.raises(TransferError, match="still running"):
        service.service.fenced()
    service.service._given_up[:] = [DONE]
    service.service.fenced()
