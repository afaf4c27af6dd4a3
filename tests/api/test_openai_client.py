"""The real ``openai`` client against a real HTTP server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from server.failure import Failure, RequestFailed
from tests.api.fakes import ANSWER, FakeBackend
from tests.api.harness import until


@pytest.fixture
def openai_client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_completion(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(model="tiny", prompt="x", logprobs=1, max_tokens=50)
    assert answer.choices[0].text == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat(openai_client: openai.OpenAI) -> None:
    raw = openai_client.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1, n=2
    )
    assert raw.headers["x-pd-prefill"] == "10.0.0.1:8998"
    assert raw.headers["x-pd-room"].count(",") == 1
    answer = raw.parse()
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]


def test_streams(openai_client: openai.OpenAI) -> None:
    chunks = list(
        openai_client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage is not None
    texts = openai_client.completions.create(model="tiny", prompt=[5, 6], stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == ANSWER


def test_models(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    assert openai_client.models.retrieve("tiny").id == "tiny"


def test_errors_are_typed(openai_client: openai.OpenAI, backend: FakeBackend) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as failure:
        openai_client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert failure.value.param == "temperature"
    backend.script.refuse = RequestFailed(Failure("no_prefill", "no prefill node"))
    with pytest.raises(openai.InternalServerError, match="no prefill node") as unavailable:
        openai_client.completions.create(model="tiny", prompt="x")
    assert unavailable.value.status_code == 503


def test_error_in_a_stream_is_raised(openai_client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.fail_after = 2
    stream = openai_client.completions.create(model="tiny", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="the room failed"):
        list(stream)
    until(backend.all_over)  # the client raises at the error event, the server ends its generator after it
