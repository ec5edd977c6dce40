"""The app of ``tpkernels serve`` without ranks, on a manager that generates what a test says."""

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
    """As transformers' ``GenerationOutput``."""

    request_id: str
    generated_tokens: list[int]
    finished: bool = False
    error: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)

    def is_finished(self) -> bool:
        return self.finished


@dataclass
class FakeManager:
    """Generates ``tokens`` after each prompt; while ``held``, only ``before_hold`` of them."""

    tokens: list[int]
    before_hold: int = 0
    held: bool = False
    error: str | None = None  #: of a request, after its tokens
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
            while self.held and count > self.before_hold:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)
            if self.cancelled.count(name) > self.forgetful:
                return
            last = count == len(tokens) or tokens[count - 1] in options["eos_token_id"]
            error = self.error if last else None
            output = Output(name, tokens[:count], last, error)
            if options["logprobs"] is not None:
                seen = options["input_ids"][1:] * options["scored"] + tokens[:count]
                tops = [[(token, -0.25), (7, -2.0)][: options["logprobs"]] for token in seen]
                output.logprobs = [
                    Logprob(token, -0.25, top) for token, top in zip(seen, tops, strict=True)
                ]
            self.output_router.deliver(output)
            if last:
                return


def tokens_of(text: str) -> list[int]:
    """Its tokens, and the one that ends an answer."""
    return [*served.tokenizer()(text)["input_ids"], END]


def service(
    manager: FakeManager,
    *,
    most: int = 8,
    timeout: float = 20.0,
    template: str | None = served.TEMPLATE,
    **options: Any,
) -> Service:
    tokenizer = served.tokenizer(template)
    batcher = Batcher(manager, tokenizer, end_tokens=[END], most=most, timeout=timeout)
    prompts = Prompts(tokenizer, vocabulary=hf_models.VOCAB, most=LENGTH)
    return Service(NAME, batcher, prompts, **options)


def app_of(what: Service) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        what.batcher.start()
        yield

    return make_app(what, lifespan)


@contextlib.contextmanager
def client(what: Service) -> Iterator[TestClient]:
    with TestClient(app_of(what), raise_server_exceptions=False) as http:
        yield http
