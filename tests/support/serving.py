"""The app of ``tpkernels serve`` without ranks, on a manager that generates fixed tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from tests.support import hf_models, served
from tpkernels.integrations.transformers.sampling import Logprob
from tpkernels.integrations.transformers.serving.api import Prompts
from tpkernels.integrations.transformers.serving.app import Service, make_app
from tpkernels.integrations.transformers.serving.batcher import Batcher

NAME, LENGTH, END = "tiny", 64, 2


@dataclass
class Output:
    """Mirrors ``GenerationOutput`` of transformers."""

    request_id: str
    generated_tokens: list[int]
    finished: bool = False
    error: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)

    def is_finished(self) -> bool:
        return self.finished


@dataclass
class FakeManager:
    """Generates ``tokens`` after each prompt.

    While ``paused``, it generates only ``tokens_before_pause`` of them.
    """

    tokens: list[int]
    tokens_before_pause: int = 0
    paused: bool = False
    error: str | None = None  #: error that each request reports after its tokens
    added: dict[str, dict[str, Any]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    forgetful: bool = False  #: the first cancellation of a request has no effect
    running: bool = False
    output_router: Any = None

    def __post_init__(self) -> None:
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self.running = True

    def is_running(self) -> bool:
        return self.running

    def add_request(self, input_ids: list[int], *, request_id: str, **options: Any) -> str | None:
        if not self.running:
            return None
        self.added[request_id] = {"input_ids": input_ids, **options}
        task = asyncio.get_running_loop().create_task(self._generate(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return request_id

    def cancel_request(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def _generate(self, name: str) -> None:
        options = self.added[name]
        tokens = self.tokens[: options["max_new_tokens"]]
        for count in range(1, len(tokens) + 1):
            while self.paused and count > self.tokens_before_pause:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)
            if self.cancelled.count(name) > self.forgetful:
                return
            last = count == len(tokens) or tokens[count - 1] in options["eos_token_id"]
            error = self.error if last else None
            output = Output(name, tokens[:count], last, error)
            if options["logprobs"] is not None:
                scored_tokens = options["input_ids"][1:] * options["scored"] + tokens[:count]
                tops = [
                    [(token, -0.25), (7, -2.0)][: options["logprobs"]] for token in scored_tokens
                ]
                output.logprobs = [
                    Logprob(token, -0.25, top)
                    for token, top in zip(scored_tokens, tops, strict=True)
                ]
            self.output_router.deliver(output)
            if last:
                return


def tokenize(answer: str) -> list[int]:
    """Return the tokens of an answer and the end token."""
    return [*served.tokenizer()(answer)["input_ids"], END]


def service(
    manager: FakeManager,
    *,
    max_requests: int = 8,
    timeout: float = 20.0,
    template: str | None = served.TEMPLATE,
    **options: Any,
) -> Service:
    tokenizer = served.tokenizer(template)
    batcher = Batcher(
        manager, tokenizer, end_tokens=[END], max_requests=max_requests, timeout=timeout
    )
    prompts = Prompts(tokenizer, vocabulary=hf_models.VOCAB, max_length=LENGTH)
    return Service(NAME, batcher, prompts, **options)


def make_test_app(app_service: Service) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        app_service.batcher.start()
        yield

    return make_app(app_service, lifespan)


@contextlib.contextmanager
def client(app_service: Service) -> Iterator[TestClient]:
    with TestClient(make_test_app(app_service), raise_server_exceptions=False) as http:
        yield http
