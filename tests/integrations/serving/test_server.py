"""``tpkernels serve`` as users run it: two ranks, real sockets and the openai client."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import served

transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.thorough
PROMPTS = [f"the number is {i} and so on" for i in range(8)]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[served.Server]:
    """Serve with a cache so small that requests wait and restart."""
    with served.server(folder, "--cache-tokens", 208, "--max-requests", 8) as running:
        yield running
        code = running.stop()
        assert code == 0, running.output()
        assert running.output().count("\n") == 1, running.output()  # only the line with the address


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[str]:
    """Return the answers of the unsharded model, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = served.tokenizer()
    answers = []
    for prompt in PROMPTS:
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        output = model.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=2)
        answers.append(tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True))
    return answers


@pytest.fixture(scope="module")
def client(server: served.Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def body(server: served.Server, **fields: Any) -> dict[str, Any]:
    return {"model": server.name, "prompt": PROMPTS[0], "temperature": 0, **fields}


def test_greedy_answers_match_one_rank(
    server: served.Server, client: Any, greedy: list[str]
) -> None:
    def ask(prompt: str) -> str:
        fields = body(server, prompt=prompt, max_tokens=NEW)
        return str(client.completions.create(**fields).choices[0].text)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, PROMPTS)) == greedy
    assert len(set(greedy)) > 4  # equal answers would hide a mix-up


def test_the_openai_client(server: served.Server, client: Any, greedy: list[str]) -> None:
    assert [model.id for model in client.models.list()] == [server.name]
    completion = client.completions.create(**body(server, max_tokens=NEW), stream=True)
    assert "".join(chunk.choices[0].text for chunk in completion) == greedy[0]

    chat = {"model": server.name, "messages": [{"role": "user", "content": "how are you?"}]}
    reply = client.chat.completions.create(**chat, temperature=0, max_tokens=NEW)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**chat, temperature=0, max_tokens=NEW, **streamed))
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert content == reply.choices[0].message.content
    assert chunks[-1].usage == reply.usage and reply.usage.completion_tokens > 0


def count_sleeps(server: served.Server) -> int:
    """Return the number of sleeps of the threads that wait for gloo collectives."""
    count = 0
    for task in (task for pid in server.ranks() for task in Path(f"/proc/{pid}/task").iterdir()):
        if (task / "comm").read_text().startswith("pt_gloo_runloop"):
            match = re.search(
                r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.M
            )
            count += int(match[1]) if match else 0
    return count


def test_idle_ranks_synchronize_once_a_second(server: served.Server, client: Any) -> None:
    """A request does not wait for the next synchronization."""
    fields = body(server, max_tokens=1)
    before = count_sleeps(server)
    time.sleep(3)
    num_sleeps = count_sleeps(server) - before
    assert 0 < num_sleeps < 60, num_sleeps  # 274 with the wait of transformers
    seconds = []
    for _ in range(5):
        begin = time.monotonic()
        client.completions.create(**fields)
        seconds.append(time.monotonic() - begin)
    assert sorted(seconds)[2] < 0.5, seconds
