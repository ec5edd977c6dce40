"""Refused requests: the status, and the parameter in the error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from tests.integrations.serving.test_app import get_error
from tests.support.serving import LENGTH, NAME, FakeManager, client, service, tokenize

MESSAGES = [{"role": "user", "content": "a"}]
GOOD = {
    "/v1/completions": {"model": NAME, "prompt": "a"},
    "/v1/chat/completions": {"model": NAME, "messages": MESSAGES},
}
COMMON_FIELDS: dict[str, list[Any]] = {
    "temperature": [-1, 2.5, "hot"],
    "top_p": [-0.1, 1.1, "most"],
    "top_k": [-2, 1.5, 1 << 31],
    "min_p": [-0.1, 1.5],
    "max_tokens": [0, 1.5, "many", 10**30, LENGTH],
    "stop": ["", ["a"] * 17, [""], [1], 7, "x" * 2000],
    "stream": ["perhaps", 3],
    "stream_options": [{"include_usage": True}, {"other": 1}, 5],
    "seed": [1.5, 1 << 63],
    "n": [0, 129, 1.5],
    "presence_penalty": [-2.5],
    "frequency_penalty": [2.5, []],
    "repetition_penalty": [0, 1000],
    "logit_bias": [{"5": 100}],
    "unheard_of": [1],
    "model": [None, 5, ["a"]],
}
PROMPTS: list[Any] = ["", [], ["a", ""], ["a", 5], [[1, 2], [47]], [[1, 2], []], [["a"]], [1.5]]
PROMPTS += [[-1], [True], [10**30], 5, None, "a" * LENGTH, [5] * LENGTH]
USER, IMAGE = {"role": "user"}, {"type": "image_url", "image_url": {"url": "x"}}
CHATS: list[Any] = [[], "a", [USER], [{"content": "a"}], [{"role": "robot", "content": "a"}]]
CHATS += [[{**USER, "content": content}] for content in ("a" * LENGTH, [IMAGE])]
CHATS += [[{**USER, "content": "a", "tool_calls": []}]]
ENDPOINT_FIELDS: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {
        "prompt": PROMPTS,
        "echo": ["twice", 5],
        "best_of": [2],
        "logprobs": [-1, 21, True, 1.5],
        "suffix": ["b"],
        "messages": [MESSAGES],
    },
    "/v1/chat/completions": {
        "messages": CHATS,
        "max_completion_tokens": [0, LENGTH],
        "logprobs": [3, "some"],
        "top_logprobs": [2, -1, 21],
        "echo": [True],
        "tools": [[{"type": "function", "function": {"name": "f"}}]],
        "tool_choice": ["required"],
        "response_format": [{"type": "json_object"}],
    },
}
CASES = [
    (path, field, value)
    for path, endpoint_fields in ENDPOINT_FIELDS.items()
    for field, values in {**COMMON_FIELDS, **endpoint_fields}.items()
    for value in values
]


EMPTY = "is empty; expected up to 16 strings of 1 to 1024 characters"


@pytest.fixture(scope="module")
def manager() -> FakeManager:
    return FakeManager(tokenize("b"))


@pytest.fixture(scope="module")
def http(manager: FakeManager) -> Iterator[TestClient]:
    with client(service(manager)) as http:
        yield http


def test_bad_fields(http: TestClient, manager: FakeManager) -> None:
    """All cases share a test, because a request lasts about a millisecond."""
    wrong = []
    for path, field, value in CASES:
        reply = http.post(path, json={**GOOD[path], field: value})
        named = reply.json().get("error", {}).get("param") or ""
        if reply.status_code != 400 or named.split(".")[0] not in (field, "max_tokens"):
            wrong.append(f"{path} {field}={value!r}: {reply.status_code} {reply.text[:200]}")
    assert not wrong, "\n".join(wrong)
    assert not manager.added


def test_fields_without_effect_are_accepted(http: TestClient) -> None:
    zero = ("frequency_penalty", "min_p", "temperature", "top_p")
    null = ("logprobs", "stream_options", "stream", "reasoning_effort")
    neutral = {"n": 1, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}}
    neutral |= {"user": "me", "metadata": {"a": "b"}, "seed": 5, "top_k": -1, "stop": []}
    neutral |= {**dict.fromkeys(zero, 0), **dict.fromkeys(null)}
    for path, good in GOOD.items():
        for fields in (neutral, {}):  # a server that refuses everything would pass the other tests
            reply = http.post(path, json={**good, **fields})
            assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/v1/completions", {"max_tokens": 0}, "max_tokens", "needs echo"),
        (
            "/v1/completions",
            {"prompt": ["a"] * 6, "n": 3},
            None,
            "18 answers in one request; at most",
        ),
        ("/v1/completions", {"stop": ["a"] * 17}, "stop", "got 17 stop strings; at most 16 are"),
        ("/v1/completions", {"max_tokens": LENGTH}, "max_tokens", f"room for {LENGTH - 1} tokens"),
        ("/v1/completions", {"prompt": "a" * 69}, "prompt", "69 tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages", "role?"),
        ("/v1/completions", {"best_of": 3}, "best_of", "leave it out, or pass 1"),
        ("/v1/completions", {"foo": 3}, "foo", "foo: unknown field; leave it out"),
        ("/v1/completions", {"stop": [1]}, "stop", "stop: Input should be a valid string"),
        ("/v1/completions", {"stop": ["a", ""]}, "stop", f"stop: stop string 1 {EMPTY}"),
        ("/v1/completions", {"stop": [""]}, "stop", f"stop: stop string 0 {EMPTY}"),
        ("/v1/completions", {"stop": ""}, "stop", f"stop: stop string 0 {EMPTY}"),
        ("/v1/completions", {"prompt": [5, 47]}, "prompt", "token id 47 at position 1 is out of "),
        ("/v1/completions", {"prompt": [-1]}, "prompt", "expected 0 to 46 (vocabulary size 47)"),
        (
            "/v1/chat/completions",
            {"max_completion_tokens": LENGTH},
            "max_completion_tokens",
            f"max_completion_tokens is {LENGTH}, but the prompt leaves room for ",
        ),
    ],
)
def test_error_messages(
    http: TestClient, path: str, fields: dict[str, Any], param: str | None, message: str
) -> None:
    error = get_error(http.post(path, json={**GOOD[path], **fields}), 400)
    assert error["param"] == param and message in error["message"], error


def post_body(http: TestClient, path: str, content: Any, kind: str = "application/json") -> Any:
    return http.post(path, content=content, headers={"content-type": kind})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"a":' * 100_000])
def test_bodies_without_an_object(http: TestClient, content: bytes) -> None:
    for path in GOOD:
        get_error(post_body(http, path, content), 400)


HALF_CHARACTER = "\ud800"
HALF_CONTENT = {"type": "text", "text": HALF_CHARACTER}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": HALF_CHARACTER}),
        ("/v1/completions", {"stop": "a\udfff"}),
        ("/v1/completions", {HALF_CHARACTER: 1}),
        ("/v1/completions", {"x" * 10_000: 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF_CHARACTER}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [HALF_CONTENT]}]}),
    ],
)
def test_half_a_character(http: TestClient, path: str, fields: dict[str, Any]) -> None:
    """JSON may contain half a surrogate pair, which is not valid UTF-8. The error is short."""
    reply = post_body(http, path, json.dumps({**GOOD[path], **fields}))
    assert len(get_error(reply, 400)["message"]) < 1100
    reply = post_body(http, path, json.dumps({**GOOD[path], "model": HALF_CHARACTER}))
    assert reply.status_code in (400, 404)


def test_json_must_be_declared(http: TestClient) -> None:
    """Browsers let web pages send text to local servers, but not JSON. So text is refused."""
    for kind in ("text/plain", ""):
        reply = post_body(http, "/v1/completions", json.dumps(GOOD["/v1/completions"]), kind)
        message = get_error(reply, 400)["message"]
        assert message == f"content-type is '{kind}'; send application/json"


def test_messages_of_the_openai_client(http: TestClient) -> None:
    """``model_dump()`` of a reply contains null for missing fields. The server accepts it."""
    answer = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None}
    reply = http.post("/v1/chat/completions", json={"model": NAME, "messages": [*MESSAGES, answer]})
    assert reply.status_code == 200, reply.text


def test_the_position_of_a_json_error(http: TestClient) -> None:
    kind = "application/json; charset=utf-8"
    error = get_error(post_body(http, "/v1/completions", '{"model": "a" 1}', kind), 400)
    assert error["param"] is None and "the body is not JSON: " in error["message"]
    assert error["message"].endswith(", at character 14"), error


def test_other_models_paths_and_methods(http: TestClient) -> None:
    for path, good in GOOD.items():
        assert get_error(http.post(path, json={**good, "model": "x"}), 404)["param"] == "model"
        get_error(http.get(path), 405)
    get_error(http.get("/v1/nothing"), 404)
    get_error(http.get("/docs"), 404)


def test_a_large_body() -> None:
    with client(service(FakeManager([]), max_body_bytes=1000)) as http:
        for content in (b"x" * 1001, iter([b"x" * 600] * 2)):
            reply = http.post("/v1/completions", content=content)
            assert "1000 bytes" in get_error(reply, 413)["message"]


def test_a_model_without_a_template() -> None:
    with client(service(FakeManager(tokenize("b")), template=None)) as http:
        reply = http.post("/v1/chat/completions", json=GOOD["/v1/chat/completions"])
        assert "/v1/completions" in get_error(reply, 400)["message"]
        assert http.post("/v1/completions", json=GOOD["/v1/completions"]).status_code == 200


def test_a_tokenizer_that_is_not_fast() -> None:
    from tpkernels.integrations.transformers.serving.api import Prompts

    with pytest.raises(ValueError, match=r"is not a fast tokenizer; copy a tokenizer\.json"):
        Prompts(object(), vocabulary=5, max_length=5)
