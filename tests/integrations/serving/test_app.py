"""The HTTP interface, with a manager that generates a fixed answer."""

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

from tests.support.serving import LENGTH, NAME, FakeManager, client, service, tokenize

CHAT = [{"role": "user", "content": "how are you?"}]


@contextlib.contextmanager
def served(answer: str = "fine. you?", **options: Any) -> Iterator[tuple[TestClient, FakeManager]]:
    manager = FakeManager(tokenize(answer))
    with client(service(manager, **options)) as http:
        yield http, manager


def complete(http: TestClient, **fields: Any) -> Any:
    body = {"model": NAME, "prompt": "how are you?", **fields}
    return http.post("/v1/completions", json=body)


def chat(http: TestClient, **fields: Any) -> Any:
    return http.post("/v1/chat/completions", json={"model": NAME, "messages": CHAT, **fields})


def events(reply: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, which must end like an OpenAI stream."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def get_error(reply: Any, status: int) -> dict[str, Any]:
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
        assert added["input_ids"] == tokenize("how are you?")[:-1]
        sampling = added["sampling"]
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 0, 1)
        assert added["max_new_tokens"] == 16 and added["eos_token_id"] == [2]
        assert complete(http, prompt=[5, 6, 7]).status_code == 200
        _, added = manager.added.values()
        assert added["input_ids"] == [5, 6, 7]
        sampling = added["sampling"]
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1, 0, 1)


def test_a_chat_uses_the_template_of_the_model() -> None:
    with served() as (http, manager):
        messages = [{"role": "system", "content": [{"type": "text", "text": "be "}] * 2}, *CHAT]
        reply = chat(http, messages=messages, max_completion_tokens=3).json()
        assert reply["object"] == "chat.completion"
        (choice,) = reply["choices"]
        assert choice["message"] == {"role": "assistant", "content": "fin"}
        assert choice["finish_reason"] == "length"
        chat(http)
        first, second = manager.added.values()
        assert first["input_ids"] == tokenize("s be be \nu how are you?\na ")[:-1]
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
        end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert chunks[-2]["choices"] == [end]
        contents = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-2]]
        assert "".join(contents) == "fine. you?"


def test_a_stop_string_ends_the_request() -> None:
    with served("one two three") as (http, manager):
        manager.paused, manager.tokens_before_pause = True, len("one two")
        (choice,) = chat(http, stop=["three", "two"]).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
        choices = [event["choices"][0] for event in events(complete(http, stop="two", stream=True))]
        assert "".join(choice["text"] for choice in choices) == "one "
        assert choices[-1]["finish_reason"] == "stop"
        assert manager.cancelled == list(manager.added)


def test_log_probabilities() -> None:
    with served("fi?") as (http, _):
        (choice,) = complete(http, max_tokens=3, logprobs=2).json()["choices"]
        assert choice["logprobs"] == {
            "tokens": ["f", "i", "?"],
            "token_logprobs": [-0.25] * 3,
            "top_logprobs": [{token: -0.25, "e": -2.0} for token in "fi?"],
            "text_offset": [0, 1, 2],
        }
        (choice,) = complete(http, logprobs=0).json()["choices"]
        shown = choice["logprobs"]  # the token that ends the answer has no text
        assert shown["tokens"] == ["f", "i", "?", "</s>"] and shown["text_offset"] == [0, 1, 2, 3]
        assert shown["top_logprobs"] == [{token: -0.25} for token in shown["tokens"]]
        assert complete(http).json()["choices"][0]["logprobs"] is None

        (choice,) = chat(http, logprobs=True, top_logprobs=1, max_tokens=2).json()["choices"]
        entry = {"token": "f", "logprob": -0.25, "bytes": [102]}
        assert choice["logprobs"]["content"][0] == {**entry, "top_logprobs": [entry]}
        assert len(choice["logprobs"]["content"]) == 2


def test_offsets_of_special_tokens() -> None:
    """Offsets count a special token in a text prompt. They do not count special tokens in a token
    prompt or in the answer, because the returned text omits these."""
    with served("e") as (http, _):
        fields = {"max_tokens": 2, "echo": True, "logprobs": 1}
        for prompt, want in (("a</s>b", "a</s>be"), (tokenize("a") + tokenize("b")[:-1], "abe")):
            (choice,) = complete(http, prompt=prompt, **fields).json()["choices"]
            assert choice["text"] == want and choice["logprobs"]["tokens"][1] == "</s>"
            want_offsets = [want.find(token, i) for i, token in enumerate("abe")]
            offsets = choice["logprobs"]["text_offset"]
            assert [offsets[0], *offsets[2:4]] == want_offsets and offsets[1] == 1


def test_bytes_of_partial_characters() -> None:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from tpkernels.integrations.transformers.serving.api import Prompts

    names = ["a", *(f"<0x{byte:02X}>" for byte in "\N{EURO SIGN}".encode())]
    fallback = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    by_byte.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_byte.decoder = decoders.ByteLevel()
    for backend in (fallback, by_byte):
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
        prompts = Prompts(tokenizer, vocabulary=300, max_length=5)
        tokens = range(1, 4) if backend is fallback else tokenizer("\N{EURO SIGN}")["input_ids"]
        decoded = [byte for token in tokens for byte in prompts.decode_token(token)[1] or ()]
        assert bytes(decoded).decode() == "\N{EURO SIGN}"
        assert prompts.decode_token(tokenizer("a")["input_ids"][0]) == ("a", [97])


@pytest.mark.parametrize(("new", "prompt"), [(0, "how"), (1, tokenize("how")[:-1])])
def test_an_echo_with_log_probabilities(new: int, prompt: Any) -> None:
    """Evaluation harnesses send these requests."""
    with served("e") as (http, _):
        fields = {"prompt": [prompt, "a"], "max_tokens": new, "echo": True, "logprobs": 1}
        reply = complete(http, **fields).json()
        first, second = reply["choices"]
        assert first["text"] == "howe"[: 3 + new] and second["text"] == "ae"[: 1 + new]
        assert first["logprobs"]["tokens"] == list("howe"[: 3 + new])
        assert first["logprobs"]["token_logprobs"] == [None, *[-0.25] * (2 + new)]
        assert first["logprobs"]["top_logprobs"][:2] == [None, {"o": -0.25}]
        assert second["logprobs"]["text_offset"] == [0, 1][: 1 + new]
        usage = {"prompt_tokens": 4, "completion_tokens": 2 * new, "total_tokens": 4 + 2 * new}
        assert reply["usage"] == usage
        stream_choices = [
            chunk["choices"][0] for chunk in events(complete(http, stream=True, **fields))
        ]
        for choice in reply["choices"]:
            parts = [
                part_choice
                for part_choice in stream_choices
                if part_choice["index"] == choice["index"]
            ]
            assert "".join(part_choice["text"] for part_choice in parts) == choice["text"]
            assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
            shown = [part_choice["logprobs"] for part_choice in parts if part_choice["logprobs"]]
            for name, values in choice["logprobs"].items():
                assert [value for part_choice in shown for value in part_choice[name]] == values


def test_several_prompts_and_answers() -> None:
    with served() as (http, manager):
        fields = {"prompt": ["a", [5, 6]], "n": 2, "seed": 10, "frequency_penalty": 0.5}
        reply = complete(http, **fields).json()
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert {choice["text"] for choice in reply["choices"]} == {"fine. you?"}
        usage = {"prompt_tokens": 3, "completion_tokens": 44, "total_tokens": 47}
        assert reply["usage"] == usage
        added = list(manager.added.values())
        assert [len(request["input_ids"]) for request in added] == [1, 1, 2, 2]
        assert [request["sampling"].seed for request in added] == [10, 11, 12, 13]
        assert added[3]["sampling"].frequency_penalty == 0.5
        options = {"include_usage": True}
        *stream, last = events(complete(http, **fields, stream=True, stream_options=options))
        assert last["usage"] == usage
        for index in range(4):
            parts = [
                chunk["choices"][0] for chunk in stream if chunk["choices"][0]["index"] == index
            ]
            assert "".join(chunk["text"] for chunk in parts) == "fine. you?"
            assert [chunk["finish_reason"] for chunk in parts][-2:] == [None, "stop"]
        *chunks, _ = events(chat(http, n=2, stream=True, stream_options=options))
        roles = [chunk["choices"][0] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
        assert [choice["index"] for choice in roles] == [0, 1]
        # Without a seed, each choice gets a different seed.
        chat(http, n=2)
        *_, first, second = manager.added.values()
        assert first["sampling"].seed != second["sampling"].seed


def test_models_health_and_metrics() -> None:
    with served() as (http, manager):
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [NAME]
        assert http.get(f"/v1/models/{NAME}").json()["id"] == NAME
        assert get_error(http.get("/v1/models/other"), 404)["code"] == "model_not_found"
        complete(http)
        get_error(complete(http, prompt=""), 400)
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
        assert get_error(complete(http), 503)["type"] == "server_error"


def test_a_key() -> None:
    with served(key="secret") as (http, manager):
        assert get_error(complete(http), 401)["code"] == "invalid_api_key"
        http.headers["authorization"] = "Bearer wrong"
        get_error(http.get("/v1/models"), 401)
        assert http.get("/health").status_code == 200
        http.headers["authorization"] = "Bearer secret"
        assert complete(http).status_code == 200
        assert len(manager.added) == 1


def test_an_error_of_the_generation() -> None:
    with served() as (http, manager):
        manager.error = "it broke"
        assert get_error(complete(http, prompt=["a", "b"]), 500)["type"] == "server_error"
        *chunks, last = events(chat(http, stream=True))
        assert chunks and last["error"]["type"] == "server_error"
        assert 'tpkernels_requests_total{status="500"} 2.0' in http.get("/metrics").text


def test_an_answer_takes_too_long() -> None:
    with served(timeout=0.1) as (http, manager):
        manager.paused = True
        get_error(complete(http, prompt=["a", "b"]), 504)
        get_error(complete(http, stream=True), 504)  # before its first event
        manager.tokens_before_pause = 3
        *chunks, last = events(complete(http, stream=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "fin"
        assert "longer than 0.1 s" in last["error"]["message"]
        assert manager.cancelled == list(manager.added)


def test_too_many_requests() -> None:
    with served(max_requests=2, timeout=0.2) as (http, manager):
        manager.paused, manager.tokens_before_pause = True, 1
        asked = {"url": "/v1/completions", "json": {"model": NAME, "prompt": "a", "stream": True}}
        with http.stream("POST", **asked) as first, http.stream("POST", **asked) as second:
            assert first.status_code == second.status_code == 200
            reply = complete(http)
            assert get_error(reply, 429)["type"] == "rate_limit_error"
            assert reply.headers["retry-after"] == "1"
        manager.paused = False
        assert complete(http).status_code == 200
