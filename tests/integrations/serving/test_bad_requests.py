"""Requests that are refused: the status, and what the message names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from tests.integrations.serving.test_app import error_of
from tests.support.serving import LENGTH, NAME, FakeManager, client, service, tokens_of

MESSAGES = [{"role": "user", "content": "a"}]
GOOD = {
    "/v1/completions": {"model": NAME, "prompt": "a"},
    "/v1/chat/completions": {"model": NAME, "messages": MESSAGES},
}
BOTH = {
    "temperature": [-1, 2.5, "hot", [], {}],
    "top_p": [-0.1, 1.1, "most"],
    "top_k": [-2, 1.5, 1 << 31],
    "min_p": [-0.1, 1.5, "some"],
    "max_tokens": [0, -1, 1.5, "many", 10**30, LENGTH],
    "stop": ["", ["a"] * 17, [""], [1], 7, "x" * 2000],
    "stream": ["perhaps", 3],
    "stream_options": [{"include_usage": True}, {"other": 1}, 5],
    "seed": [1.5, "one", 1 << 63],
    "n": [0, 129, 1.5],
    "presence_penalty": [-2.5, "much"],
    "frequency_penalty": [2.5, []],
    "repetition_penalty": [0, -1, 1000],
    "logit_bias": [{"5": 100}],
    "unheard_of": [1],
    "model": [None, 5, ["a"]],
}
OWN = {
    "/v1/completions": {
        "prompt": [
            "",
            [],
            ["a", ""],
            ["a", 5],
            [[1, 2], [47]],
            [[1, 2], []],
            [["a"]],
            [1.5],
            [True],
            [-1],
            [47],
            [10**30],
            5,
            None,
            "a" * LENGTH,
            [5] * LENGTH,
        ],
        "echo": ["twice", 5],
        "best_of": [2],
        "logprobs": [-1, 21, True, 1.5],
        "suffix": ["b"],
        "messages": [MESSAGES],
    },
    "/v1/chat/completions": {
        "messages": [
            [],
            "a",
            [{"role": "user"}],
            [{"content": "a"}],
            [{"role": "robot", "content": "a"}],
            [{"role": "user", "content": "a" * LENGTH}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": "a", "tool_calls": []}],
        ],
        "max_completion_tokens": [0, LENGTH],
        "logprobs": [3, "some"],
        "top_logprobs": [2, -1, 21],
        "echo": [True],
        "tools": [[{"type": "function", "function": {"name": "f"}}]],
        "tool_choice": ["required"],
        "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
        "prompt": ["a"],
    },
}
CASES = [
    (path, field, value)
    for path, own in OWN.items()
    for field, values in {**BOTH, **own}.items()
    for value in values
]


@pytest.fixture(scope="module")
def manager() -> FakeManager:
    return FakeManager(tokens_of("b"))


@pytest.fixture(scope="module")
def http(manager: FakeManager) -> Iterator[TestClient]:
    with client(service(manager)) as http:
        yield http


def test_bad_fields(http: TestClient, manager: FakeManager) -> None:
    """One test for all: most take a millisecond."""
    wrong = []
    for path, field, value in CASES:
        reply = http.post(path, json={**GOOD[path], field: value})
        named = reply.json().get("error", {}).get("param") or ""
        if reply.status_code != 400 or named.split(".")[0] not in (field, "max_tokens"):
            wrong.append(f"{path} {field}={value!r}: {reply.status_code} {reply.text[:200]}")
    assert not wrong, "\n".join(wrong)
    assert not manager.added


def test_fields_that_change_nothing_are_taken(http: TestClient) -> None:
    neutral = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "min_p": 0,
        "logit_bias": {},
        "logprobs": None,
        "user": "me",
        "metadata": {"a": "b"},
        "seed": 5,
        "temperature": 0.0,
        "top_k": -1,
        "stop": [],
        "stream_options": None,
        "stream": None,
        "reasoning_effort": None,
        "top_p": 0,
    }
    for path, good in GOOD.items():
        for fields in (neutral, {}):  # the refusals would pass if it refused all
            reply = http.post(path, json={**good, **fields})
            assert reply.status_code == 200, reply.text


def test_messages_say_what_to_do(http: TestClient) -> None:
    def message(path: str, **fields: Any) -> str:
        return str(error_of(http.post(path, json={**GOOD[path], **fields}), 400)["message"])

    assert "needs echo" in message("/v1/completions", max_tokens=0)
    assert "18 answers in one request; at most 8" in message(
        "/v1/completions", prompt=["a"] * 6, n=3
    )
    assert "at most 16" in message("/v1/completions", stop=["a"] * 17)
    assert f"room for {LENGTH - 1} tokens" in message("/v1/completions", max_tokens=LENGTH)
    assert f"{LENGTH + 5} tokens" in message("/v1/completions", prompt="a" * (LENGTH + 5))
    assert "which role?" in message("/v1/chat/completions", messages=[{**MESSAGES[0], "role": "x"}])
    assert "or pass 1" in message("/v1/completions", best_of=3)
    assert "foo: this server has no such field" in message("/v1/completions", foo=3)
    error = error_of(
        http.post("/v1/completions", json={**GOOD["/v1/completions"], "stop": [1]}), 400
    )
    assert error["param"] == "stop" and "function-after" not in error["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"a":' * 100_000])
def test_bodies_that_are_no_object(http: TestClient, content: bytes) -> None:
    for path in GOOD:
        reply = http.post(path, content=content, headers={"content-type": "application/json"})
        error_of(reply, 400)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/completions", {"stop": "a\udfff"}),
        ("/v1/completions", {"\ud800": 1}),
        ("/v1/completions", {"x" * 10_000: 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
        ),
    ],
)
def test_half_a_character(http: TestClient, path: str, fields: dict[str, Any]) -> None:
    """JSON can have text that is no UTF-8."""
    content = json.dumps({**GOOD[path], **fields})
    reply = http.post(path, content=content, headers={"content-type": "application/json"})
    assert len(error_of(reply, 400)["message"]) < 1100
    other = json.dumps({**GOOD[path], "model": "\ud800"})
    reply = http.post(path, content=other, headers={"content-type": "application/json"})
    assert reply.status_code in (400, 404)


def test_json_must_be_declared(http: TestClient) -> None:
    """A web page may send text to a server on its reader's machine, but not JSON."""
    content = json.dumps(GOOD["/v1/completions"])
    for kind in ("text/plain", ""):
        reply = http.post("/v1/completions", content=content, headers={"content-type": kind})
        message = error_of(reply, 400)["message"]
        assert message == f"content-type is '{kind}'; send application/json"


def test_empty_stops_are_named(http: TestClient) -> None:
    for stop in ("", [""], ["a", ""]):
        reply = http.post("/v1/completions", json={**GOOD["/v1/completions"], "stop": stop})
        assert error_of(reply, 400)["message"] == "stop: a string is empty; leave it out"


def test_turns_as_the_client_of_openai_keeps_them(http: TestClient) -> None:
    """``model_dump()`` of a reply has a null for each field that it lacks."""
    lacking = dict.fromkeys(("refusal", "tool_calls", "function_call", "audio", "annotations"))
    answer = {"role": "assistant", "content": "b", **lacking}
    reply = http.post("/v1/chat/completions", json={"model": NAME, "messages": [*MESSAGES, answer]})
    assert reply.status_code == 200, reply.text


def test_where_json_ends_being_json(http: TestClient) -> None:
    kind = {"content-type": "application/json; charset=utf-8"}
    error = error_of(http.post("/v1/completions", content='{"model": "a" 1}', headers=kind), 400)
    assert error["param"] is None and "the body is not JSON: " in error["message"]
    assert error["message"].endswith(", at character 14"), error


def test_other_models_paths_and_methods(http: TestClient) -> None:
    for path, good in GOOD.items():
        assert error_of(http.post(path, json={**good, "model": "x"}), 404)["param"] == "model"
        error_of(http.get(path), 405)
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get("/docs"), 404)


def test_a_large_body() -> None:
    with client(service(FakeManager([]), most_bytes=1000)) as http:
        for content in (b"x" * 1001, iter([b"x" * 600] * 2)):
            reply = http.post("/v1/completions", content=content)
            assert "1000 bytes" in error_of(reply, 413)["message"]


def test_a_model_without_a_template() -> None:
    with client(service(FakeManager(tokens_of("b")), template=None)) as http:
        reply = http.post("/v1/chat/completions", json=GOOD["/v1/chat/completions"])
        assert "/v1/completions" in error_of(reply, 400)["message"]
        assert http.post("/v1/completions", json=GOOD["/v1/completions"]).status_code == 200


def test_a_tokenizer_that_is_not_fast() -> None:
    from tpkernels.integrations.transformers.serving.api import Prompts

    with pytest.raises(ValueError, match=r"is not a fast tokenizer; copy a tokenizer\.json"):
        Prompts(object(), vocabulary=5, most=5)
