"""The HTTP interface, with a manager that generates what the test says."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from tests.support.serving import LENGTH, NAME, FakeManager, client, service, tokens_of

CHAT = [{"role": "user", "content": "how are you?"}]


@contextlib.contextmanager
def served(text: str = "fine. you?", **options: Any) -> Iterator[tuple[TestClient, FakeManager]]:
    manager = FakeManager(tokens_of(text))
    with client(service(manager, **options)) as http:
        yield http, manager


def complete(http: TestClient, **fields: Any) -> Any:
    body = {"model": NAME, "prompt": "how are you?", **fields}
    return http.post("/v1/completions", json=body)


def chat(http: TestClient, **fields: Any) -> Any:
    return http.post("/v1/chat/completions", json={"model": NAME, "messages": CHAT, **fields})


def events(reply: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must end as OpenAI's do."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def error_of(reply: Any, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return dict(error)


def test_a_completion() -> None:
    with served() as (http, manager):
        reply = complete(http, temperature=0, stop=None).json()
        assert reply["object"] == "text_completion" and reply["model"] == NAME
        (choice,) = reply["choices"]
        assert choice["text"] == "fine. you?" and choice["finish_reason"] == "stop"
        assert choice["index"] == 0 and choice["logprobs"] is None
        usage = reply["usage"]
        assert usage == {"prompt_tokens": 12, "completion_tokens": 11, "total_tokens": 23}
        (added,) = manager.added.values()
        assert added["input_ids"] == tokens_of("how are you?")[:-1]
        assert (added["temperature"], added["top_k"], added["top_p"]) == (0, 0, 1)
        assert added["max_new_tokens"] == 16 and added["eos_token_id"] == [2]
        assert complete(http, prompt=[5, 6, 7]).status_code == 200
        _, added = manager.added.values()
        assert added["input_ids"] == [5, 6, 7]
        assert (added["temperature"], added["top_k"], added["top_p"]) == (1, 0, 1)


def test_a_chat_gets_the_models_template() -> None:
    with served() as (http, manager):
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "be "}] * 2},
            *CHAT,
        ]
        reply = chat(http, messages=messages, max_completion_tokens=3).json()
        assert reply["object"] == "chat.completion"
        (choice,) = reply["choices"]
        assert choice["message"] == {"role": "assistant", "content": "fin"}
        assert choice["finish_reason"] == "length"
        chat(http)
        first, second = manager.added.values()
        assert first["input_ids"] == tokens_of("s be be \nu how are you?\na ")[:-1]
        assert second["max_new_tokens"] == LENGTH - len(second["input_ids"])


def test_streams() -> None:
    with served() as (http, _):
        chunks = events(complete(http, stream=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "fine. you?"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
        assert len({chunk["id"] for chunk in chunks}) == 1

        chunks = events(chat(http, stream=True, stream_options={"include_usage": True}))
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 11
        assert chunks[-2]["choices"][0] == {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": "stop",
        }
        texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-2]]
        assert "".join(texts) == "fine. you?"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_request(stream: bool) -> None:
    with served("one two three") as (http, manager):
        manager.held, manager.before_hold = True, len("one two")
        reply = chat(http, stop=["three", "two"], stream=stream)
        if stream:
            choices = [chunk["choices"][0] for chunk in events(reply)]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            finish = choices[-1]["finish_reason"]
        else:
            (choice,) = reply.json()["choices"]
            text, finish = choice["message"]["content"], choice["finish_reason"]
        assert (text, finish) == ("one ", "stop")
        assert manager.cancelled == list(manager.added)


def test_models_health_and_metrics() -> None:
    with served() as (http, manager):
        assert [each["id"] for each in http.get("/v1/models").json()["data"]] == [NAME]
        assert http.get(f"/v1/models/{NAME}").json()["id"] == NAME
        assert error_of(http.get("/v1/models/other"), 404)["code"] == "model_not_found"
        complete(http)
        error_of(complete(http, prompt=""), 400)
        shown = http.get("/metrics").text
        for line in (
            'tpkernels_requests_total{status="200"} 3.0',
            'tpkernels_requests_total{status="400"} 1.0',
            'tpkernels_requests_total{status="404"} 1.0',
            "tpkernels_requests_running 0.0",
            "tpkernels_requests_waiting 0.0",
            "tpkernels_prompt_tokens_total 12.0",
            "tpkernels_generated_tokens_total 11.0",
            "tpkernels_time_to_first_token_seconds_count 1.0",
            "tpkernels_time_per_output_token_seconds_count 10.0",
        ):
            assert line in shown.splitlines(), line
        assert http.get("/health").status_code == 200
        manager.running = False
        assert http.get("/health").status_code == 503
        assert "retry-after" in complete(http).headers
        assert error_of(complete(http), 503)["type"] == "server_error"


def test_a_key() -> None:
    with served(key="secret") as (http, manager):
        assert error_of(complete(http), 401)["code"] == "invalid_api_key"
        http.headers["authorization"] = "Bearer wrong"
        error_of(http.get("/v1/models"), 401)
        assert http.get("/health").status_code == 200
        http.headers["authorization"] = "Bearer secret"
        assert complete(http).status_code == 200
        assert len(manager.added) == 1


def test_an_error_of_the_generation() -> None:
    with served() as (http, manager):
        manager.error = "it broke"
        assert error_of(complete(http), 500)["type"] == "server_error"
        *chunks, last = events(chat(http, stream=True))
        assert chunks and last["error"]["type"] == "server_error"
        assert 'tpkernels_requests_total{status="500"} 2.0' in http.get("/metrics").text


def test_an_answer_takes_too_long() -> None:
    with served(timeout=0.1) as (http, manager):
        manager.held = True
        error_of(complete(http), 504)
        error_of(complete(http, stream=True), 504)  # before its first event
        manager.before_hold = 3
        *chunks, last = events(complete(http, stream=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "fin"
        assert "longer than 0.1 s" in last["error"]["message"]
        assert manager.cancelled == list(manager.added)


def test_too_many_requests() -> None:
    with served(most=2, timeout=0.2) as (http, manager):
        manager.held = True
        manager.before_hold = 1
        with (
            http.stream("POST", "/v1/completions", json=body()) as first,
            http.stream("POST", "/v1/completions", json=body()) as second,
        ):
            assert first.status_code == second.status_code == 200
            reply = complete(http)
            assert error_of(reply, 429)["type"] == "rate_limit_error"
            assert reply.headers["retry-after"] == "1"
        manager.held = False
        assert complete(http).status_code == 200


def body() -> dict[str, Any]:
    return {"model": NAME, "prompt": "how are you?", "stream": True}
