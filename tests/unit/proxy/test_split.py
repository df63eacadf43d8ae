"""Several prompts or samples in one request: as many transfers, one answer."""

from __future__ import annotations

import json

import msgspec
import pytest

from proxy.errors import Refused
from proxy.request import Route, parse_request
from proxy.split import JointStream, Member, member_request, members
from tests.fakes.answers import prompt_of, words_of
from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import Stack, StackOf, chat_body


async def test_each_sample_has_its_own_transfer_seed_and_index(stack: Stack) -> None:
    status, body = await stack.chat(n=3, seed=7)
    answer = json.loads(body)
    assert status == 200
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert len(set(stack.cluster.consumed)) == 3
    assert sorted(s.body["seed"] for s in stack.decode[0].seen) == [7, 8, 9]
    assert all("n" not in s.body for s in stack.decode[0].seen)
    assert answer["usage"]["completion_tokens"] == 15
    assert answer["usage"]["prompt_tokens"] == len(prompt_of(chat_body()))
    assert answer["usage"]["total_tokens"] == 15 + len(prompt_of(chat_body()))


async def test_several_prompts_answer_in_order_and_count_every_prompt_once(stack: Stack) -> None:
    prompts = ["a", "bb", "ccc"]
    status, body = await stack.post(
        "/v1/completions", {"model": "fake", "prompt": prompts, "n": 2, "max_tokens": 3}
    )
    answer = json.loads(body)
    assert status == 200
    wanted = ["".join(words_of({"prompt": p, "max_tokens": 3})) for p in prompts for _ in range(2)]
    assert [c["text"] for c in answer["choices"]] == wanted
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == sum(len(json.dumps(p)) for p in prompts)
    assert len(set(stack.cluster.consumed)) == 6


async def test_a_joint_stream_has_one_identity_one_usage_and_one_end(stack: Stack) -> None:
    status, body = await stack.chat(stream=True, n=2, stream_options={"include_usage": True})
    assert status == 200
    events = [e.removeprefix(b"data: ") for e in body.split(b"\n\n") if e]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    assert {c["id"] for c in chunks} == {"chatcmpl-fake"}
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts[0] == texts[1] == "".join(words_of(chat_body()))
    usages = [c["usage"] for c in chunks if c.get("usage")]
    assert len(usages) == 1
    assert usages[0]["completion_tokens"] == 10


async def test_one_prompt_in_a_list_is_no_split(stack: Stack) -> None:
    status, _ = await stack.post("/v1/completions", {"model": "fake", "prompt": ["a"], "max_tokens": 3})
    assert status == 200
    assert stack.decode[0].seen[0].body["prompt"] == ["a"]


async def test_a_refused_member_is_the_answer_and_ends_the_others(stack: Stack) -> None:
    stack.decode[0].faults.append(Fault.HTTP_400)
    status, body = await stack.chat(n=2)
    assert status == 400
    assert json.loads(body)["error"]["message"] == "scripted 400"


async def test_a_failed_member_is_tried_again_alone(stack: Stack) -> None:
    stack.decode[0].faults.append(Fault.HTTP_500)
    status, body = await stack.chat(n=2)
    assert status == 200
    assert len(json.loads(body)["choices"]) == 2
    assert len(stack.prefill[0].seen) == 3


async def test_a_member_that_fails_late_ends_the_joint_stream_with_an_error(stack_of: StackOf) -> None:
    async with stack_of(token_delay_s=0.02) as stack:
        stack.decode[0].faults.append(Fault.CUT)
        status, body = await stack.chat(stream=True, n=2)
    assert status == 200
    assert b"[DONE]" not in body
    assert "error" in json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))


async def test_several_greedy_samples_are_left_to_the_engine_to_refuse(stack: Stack) -> None:
    await stack.chat(n=2, temperature=0)
    assert not stack.prefill[0].seen
    assert stack.decode[0].seen[0].body["n"] == 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [], "n": 1025}),
        ("/v1/chat/completions", {"messages": [], "n": 200_000}),
        ("/v1/chat/completions", {"messages": [], "n": 10**18, "prompt_logprobs": 1}),
        ("/v1/chat/completions", {"messages": [], "n": 200_000, "temperature": 0, "stream": True}),
        ("/v1/completions", {"prompt": "a", "n": 1025}),
        ("/v1/completions", {"prompt": ["a"] * 33, "n": 32}),
        ("/v1/completions", {"prompt": [[1]] * 1025}),
    ],
)
async def test_too_many_answers_are_a_400_that_reaches_no_engine(
    stack: Stack, path: str, fields: dict[str, object]
) -> None:
    status, body = await stack.post(path, {"model": "fake", **fields})
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert "1024" in error["message"]
    assert error["param"] == ("n" if "n" in fields else "prompt")
    assert not stack.prefill[0].seen
    assert not stack.decode[0].seen


def test_as_many_answers_as_allowed_are_split_and_each_is_built_when_its_turn_comes() -> None:
    raw = msgspec.json.encode({"prompt": ["a" * 4000, "b", "c", "d"], "n": 256, "seed": 3})
    request = parse_request("/v1/completions", raw)
    assert request.route is Route.SPLIT
    parts = members(request)
    assert [m.index for m in parts] == list(range(1024))
    assert not any(isinstance(getattr(parts[0], name), bytes | dict) for name in Member.__slots__)
    last = member_request(request, parts[-1])
    assert json.loads(last.raw) == {"prompt": "d", "seed": 258}


@pytest.mark.parametrize("n", ["0", "-1", "true", '"2"', "1.0", "null", "[]", "1" * 4000])
def test_a_strange_n_is_read_without_a_crash(n: str) -> None:
    for body in ('{"messages": [], "n": %s}', '{"prompt": ["a", "b"], "n": %s}'):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            try:
                request = parse_request(path, (body % n).encode())
            except Refused as error:
                assert error.status == 400
            else:
                assert request.route is not Route.SPLIT or n == "null"


@pytest.mark.parametrize("chunk", [b"", b'{"choices": null}', b'{"choices": [null, 7]}', b'{"usage": 7}'])
def test_a_chunk_without_choices_breaks_no_joint_stream(chunk: bytes) -> None:
    joint = JointStream()
    joint.chunk(Member(0, 0, 0), b'{"id": "a", "choices": [{"delta": {}}]}')
    assert b"null" not in joint.chunk(Member(1, 0, 1), chunk)
    assert joint.ending().endswith(b"data: [DONE]\n\n")


async def test_comments_between_members_events_are_skipped(stack: Stack) -> None:
    stack.decode[0].faults.extend([Fault.PINGS] * 2)
    status, body = await stack.chat(stream=True, n=2)
    assert status == 200
    assert body.count(b"content") == 10
    assert body.endswith(b"data: [DONE]\n\n")
