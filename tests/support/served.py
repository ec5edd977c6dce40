"""A small model for ``tpkernels serve``.

It has random weights and a tokenizer with one token per character.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import hf_folders, hf_models, processes
from tests.support.paths import ROOT

LENGTH = 200  # max tokens of a prompt and its answer
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,!?0123456789\n"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('which role?') }}"
    "{% endif %}{{ m.role[0] }} {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)
_START_S = 120.0


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """Create a tokenizer with one token per character. Token 2 ends an answer."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    assert len(vocabulary) <= hf_models.VOCAB
    for i in range(len(vocabulary), hf_models.VOCAB):
        vocabulary[chr(ord("A") + i)] = i
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", chat_template=template
    )


def folder(
    base: Path,
    length: int = LENGTH,
    template: str | None = TEMPLATE,
    model_type: str = "llama",
    **options: Any,
) -> Path:
    """Save a model and its tokenizer. ``length``: max tokens of a prompt and its answer."""
    path = hf_folders.folder(base, model_type, **options)
    hf_folders.change_config(path, max_position_embeddings=length)
    tokenizer(template).save_pretrained(path)
    return path


class Server:
    """``tpkernels serve`` in a separate process."""

    def __init__(self, path: Path, *args: object) -> None:
        command = [sys.executable, "-m", "tpkernels", "serve", "--model", str(path), "--port", "0"]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, *map(str, args)],
            cwd=ROOT,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.name, self.url = path.name, ""

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self.url:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)
            match = re.search(r"on (http://\S+)", self.output())
            self.url = match[1] if match else ""

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def ranks(self) -> list[int]:
        """Return the process ids by rank: the forks of the fork server, in order."""
        all_processes = list(processes.running_processes())
        servers = [process.pid for process in all_processes if process.parent == self.process.pid]
        return sorted(process.pid for process in all_processes if process.parent in servers)

    def stop(self, sign: signal.Signals = signal.SIGTERM, timeout: float = 60) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(sign)
        return self.process.wait(timeout)


@contextlib.contextmanager
def server(path: Path, *args: object) -> Iterator[Server]:
    """Start a server and wait until it accepts requests. Kill it and its ranks at the end."""
    running = Server(path, *args)
    try:
        running.wait_until_ready()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait(30)
        running.log.close()
