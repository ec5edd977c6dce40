"""The app of ``tpkernels serve`` without ranks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.testclient import TestClient

from tests.support import hf_models, served
from tests.support.fake_manager import FakeManager
from tpkernels.integrations.transformers.serving.api import Prompts
from tpkernels.integrations.transformers.serving.app import Service, make_app
from tpkernels.integrations.transformers.serving.batcher import Batcher

NAME, LENGTH, END = "tiny", 64, 2


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
