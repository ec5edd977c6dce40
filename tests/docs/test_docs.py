"""Each code block of the README and of docs/ runs; the API reference is complete; no file that they
name is missing."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import typer
from markdown_it import MarkdownIt
from typer.testing import CliRunner

import tpkernels
from tests.nccl.test_communicator import NO_GPU, pretending
from tests.support import served
from tests.support.cases import RanksFixture
from tests.support.fake_nccl import Build
from tests.support.paths import ROOT
from tests.support.processes import output_of
from tests.support.tiers import sweep, thorough
from tpkernels.cli import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# They take long, and tests of their own show that they work.
SLOW = {"tpkernels bench", "tpkernels tune", "tpkernels demo", "tpkernels profile"}
PUBLIC = ("", ".compile", ".mesh", ".nccl", ".nn", ".numerics", ".parallel")


def blocks(page: Path, language: str) -> list[str]:
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    return [t.content for t in tokens if t.type == "fence" and t.info == language]


def program(page: Path) -> str:
    """The page's Python, from top to bottom: a block may use what those before it made."""
    return "\n".join(blocks(page, "python"))


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "sh"):
        yield from (shlex.split(line, comments=True) for line in block.splitlines())


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_all_blocks_are_of_a_kind_that_is_run(page: Path) -> None:
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        assert token.type != "code_block", f"{page}: fence this, and name its language"
        if token.type == "fence" and not token.info.startswith("{"):
            assert token.info in ("python", "sh", "text"), f"{page}: {token.info}"


SCRIPTS = ["README.md", "docs/quickstart.md", "docs/index.md"]


@pytest.mark.thorough
@pytest.mark.parametrize("page", sweep(SCRIPTS))
def test_scripts(page: str, tmp_path: Path) -> None:
    """They start their ranks, and load a model that is small here."""
    pytest.importorskip("transformers")
    source, script = program(ROOT / page), tmp_path / "first.py"
    named, count = re.subn(r'NAME = "\S+"', f'NAME = "{served.folder(tmp_path)}"', source)
    assert count == (page != "docs/index.md")
    script.write_text(named + "\nprint('ran')\n")
    assert output_of(script).endswith("ran\n")


def run_job(source: str, name: str) -> None:
    exec(compile(source, name, "exec"), {"__name__": name})


WITH_MODELS = ["models", "moe", "recipes"]
ON_TWO_RANKS = ["failures", "gallery", "mesh", "numerics", "ops", "packed_weights", "scaled_ops"]
ON_TWO_RANKS += ["tuning", *WITH_MODELS]


@pytest.mark.parametrize(
    "name", [thorough(name) if name in WITH_MODELS else name for name in ON_TWO_RANKS]
)
def test_python_on_two_ranks(
    ranks: RanksFixture, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in WITH_MODELS:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    ranks(2).run(run_job, program(ROOT / "docs" / f"{name}.md"), f"{name}.md", timeout=180)


@pytest.mark.slow
def test_python_that_is_compiled(ranks: RanksFixture) -> None:
    ranks(2).run(run_job, program(ROOT / "docs" / "compile.md"), "compile.md", timeout=280)


@pretending()
def nccl_job(path: str, source: str) -> None:
    ours = functools.partial(tpkernels.nccl.Communicator, library=path)
    with mock.patch.object(tpkernels.nccl, "Communicator", ours):
        run_job(source, "nccl.md")


@NO_GPU
def test_python_of_nccl(ranks: RanksFixture, fake_nccl: Build) -> None:
    ranks(1).run(nccl_job, fake_nccl().path, program(ROOT / "docs" / "nccl.md"))


def test_all_pages_with_python_are_run() -> None:
    run = {"compile", "nccl", *ON_TWO_RANKS, *(Path(page).stem for page in SCRIPTS)}
    assert {page.stem for page in PAGES if program(page)} == run


def own_commands(page: Path) -> list[list[str]]:
    return [words for words in commands(page) if words[0] == "tpkernels"]


def cost(page: Path) -> pytest.MarkDecorator | tuple[()]:
    long = any(" ".join(words[:2]) in SLOW for words in own_commands(page))
    return pytest.mark.slow if long else ()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=cost(page), id=name)
        for page, name in zip(PAGES, names(PAGES), strict=True)
        if own_commands(page)
    ],
)
def test_commands_of_tpkernels(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, one after the other in one folder."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for _, *words in own_commands(page):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_other_commands(page: Path) -> None:
    """make has the targets; the package has the extras. Both are run by .ci/run."""
    for words in commands(page):
        if words[0] == "make":
            subprocess.run([*words, "-n"], cwd=ROOT, check=True, timeout=60, capture_output=True)
        elif words[:2] == ["pip", "install"]:
            extras = set(re.findall(r"\w+", words[2]))
            assert extras <= set(metadata("tpkernels").get_all("Provides-Extra") or ()), words
        else:
            assert words[0] == "tpkernels", f"{page}: no test runs {words}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_options_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for _, name, *options in own_commands(page):
        group.get_command(None, name).make_context(name, options)


@pytest.mark.parametrize(
    ("picture", "results"), [("llama", "cpu-2core-llama"), ("ops", "cpu-2core-ops")]
)
def test_the_pictures_are_of_measured_results(picture: str, results: str) -> None:
    path = f"docs/images/{picture}.svg"
    assert f"]({path})" in PAGES[0].read_text()
    assert path in (ROOT / f"benchmarks/results/{results}.md").read_text()
    assert ElementTree.parse(ROOT / path).getroot().tag.endswith("svg")


def test_messages_of_troubleshooting() -> None:
    """What stands in its first columns is in the code: between numbers, quotes and "..."."""
    sources = [*(ROOT / "tpkernels").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    code = "".join(path.read_text() for path in sources)
    code = re.sub(r"""["']\s*f?["']""", "", code)  # adjacent literals are one
    rows = re.findall(r"^\| `(.+?)`", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    parts = {
        part.strip(" ,#") for row in rows for part in re.split(r"\.\.\.|['\":;()\[\]]|\d+", row)
    }
    wanted = {part for part in parts if len(part.split()) > 2}
    assert len(rows) > 20 and not [part for part in wanted if part not in code]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_all_that_is_public(module: str) -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
    there = set(
        re.findall(r"^\.\. auto(?:function|class|exception):: (?:\w+\.)*(\w+)$", text, re.M)
    )
    public = importlib.import_module(f"tpkernels{module}")
    wanted = {name for name in public.__all__ if not isinstance(getattr(public, name), ModuleType)}
    assert wanted and wanted <= there, wanted - there


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_files_that_are_named_exist(page: Path) -> None:
    folders = r"(?:tpkernels|csrc|tests|benchmarks|examples|docs)"
    for path in re.findall(rf"`({folders}/[\w./]*)`", page.read_text()):
        assert (ROOT / path).exists() or "X." in path, f"{page}: {path}"
