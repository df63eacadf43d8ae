"""The official client understands what the proxy says, errors included."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from proxy.settings import PolicySettings
from tests.fakes.answers import words_of
from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import Stack, StackOf, chat_body

MESSAGES = chat_body()["messages"]
TEXT = "".join(words_of(chat_body()))


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5)
    assert answer.choices[0].message.content == TEXT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


async def test_a_stream_with_its_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None


async def test_completions_of_several_prompts(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=3)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["fake"]


async def test_errors_are_the_clients_own_classes(stack_of: StackOf) -> None:
    async with stack_of(retries=0, policy=PolicySettings(fallback="none")) as stack:
        client = openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
            await client.chat.completions.create(
                model="fake", messages=MESSAGES, extra_body={"kv_transfer_params": {}}
            )
        stack.decode[0].faults.append(Fault.HTTP_500)
        with pytest.raises(openai.InternalServerError, match="scripted 500"):
            await client.chat.completions.create(model="fake", messages=MESSAGES)
        await client.close()


async def test_a_stream_that_breaks_raises_in_the_client(stack_of: StackOf) -> None:
    async with stack_of(token_delay_s=0.02) as stack:
        stack.decode[0].faults.append(Fault.ERROR_LATER)
        client = openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        texts = ""
        with pytest.raises(openai.APIError, match="EngineCore"):
            async for chunk in stream:
                texts += chunk.choices[0].delta.content or ""
        assert texts == "".join(words_of(chat_body())[:2])
        await client.close()
