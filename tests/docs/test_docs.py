"""The code blocks of the README and of docs/ run, the API reference is complete, and the referenced
files exist."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import subprocess
import sys
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
from tests.nccl.test_communicator import NO_GPU, cpu_as_current_device
from tests.support import served
from tests.support.cases import RanksFixture
from tests.support.fake_nccl import Build
from tests.support.paths import ROOT
from tests.support.processes import python_output
from tests.support.tiers import sweep, thorough
from tpkernels.cli import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Long commands that have separate tests.
SLOW = {"tpkernels bench", "tpkernels tune", "tpkernels demo", "tpkernels profile"}
PUBLIC = ("", ".compile", ".mesh", ".nccl", ".nn", ".numerics", ".parallel")


def blocks(page: Path, language: str) -> list[str]:
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    return [t.content for t in tokens if t.type == "fence" and t.info == language]


def program(page: Path) -> str:
    """Return the Python blocks of a page in order. A block may use names of earlier blocks."""
    return "\n".join(blocks(page, "python"))


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "sh"):
        yield from (shlex.split(line, comments=True) for line in block.splitlines())


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_block_has_a_known_language(page: Path) -> None:
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        assert token.type != "code_block", f"{page}: fence this, and name its language"
        if token.type == "fence" and not token.info.startswith("{"):
            assert token.info in ("python", "sh", "text"), f"{page}: {token.info}"


SCRIPTS = ["README.md", "docs/quickstart.md", "docs/index.md"]


@pytest.mark.thorough
@pytest.mark.parametrize("page", sweep(SCRIPTS))
def test_scripts(page: str, tmp_path: Path) -> None:
    """The scripts start their ranks and load a small model."""
    pytest.importorskip("transformers")
    source, script = program(ROOT / page), tmp_path / "first.py"
    changed_source, count = re.subn(r'NAME = "\S+"', f'NAME = "{served.folder(tmp_path)}"', source)
    assert count == (page != "docs/index.md")
    script.write_text(changed_source + "\nprint('ran')\n")
    assert python_output(script).endswith("ran\n")


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


def test_python_under_torchrun(tmp_path: Path) -> None:
    """The page imports no tpkernels: torch finds the backend by its entry point."""
    script = tmp_path / "train.py"
    script.write_text(program(ROOT / "docs" / "backend.md") + "\nprint('ran')\n")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    output = subprocess.run(
        [sys.executable, *launcher, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert output.returncode == 0, output.stderr[-3000:]
    assert output.stdout.count("ran") == 2


@pytest.mark.slow
def test_python_that_is_compiled(ranks: RanksFixture) -> None:
    ranks(2).run(run_job, program(ROOT / "docs" / "compile.md"), "compile.md", timeout=280)


@cpu_as_current_device()
def nccl_job(path: str, source: str) -> None:
    communicator = functools.partial(tpkernels.nccl.Communicator, library=path)
    with mock.patch.object(tpkernels.nccl, "Communicator", communicator):
        run_job(source, "nccl.md")


@NO_GPU
def test_python_of_nccl(ranks: RanksFixture, fake_nccl: Build) -> None:
    ranks(1).run(nccl_job, fake_nccl().path, program(ROOT / "docs" / "nccl.md"))


def test_all_pages_with_python_are_run() -> None:
    run = {"backend", "compile", "nccl", *ON_TWO_RANKS, *(Path(page).stem for page in SCRIPTS)}
    assert {page.stem for page in PAGES if program(page)} == run


def tpkernels_commands(page: Path) -> list[list[str]]:
    return [command for command in commands(page) if command[0] == "tpkernels"]


def slow_mark(page: Path) -> pytest.MarkDecorator | tuple[()]:
    long = any(" ".join(command[:2]) in SLOW for command in tpkernels_commands(page))
    return pytest.mark.slow if long else ()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=slow_mark(page), id=name)
        for page, name in zip(PAGES, names(PAGES), strict=True)
        if tpkernels_commands(page)
    ],
)
def test_commands_of_tpkernels(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of a page in order, in one folder."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for _, *args in tpkernels_commands(page):
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0, (args, result.output)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_other_commands(page: Path) -> None:
    """make has the targets, and the package has the extras. .ci/run runs both."""
    for command in commands(page):
        if command[0] == "make":
            subprocess.run([*command, "-n"], cwd=ROOT, check=True, timeout=60, capture_output=True)
        elif command[:2] == ["pip", "install"]:
            extras = set(re.findall(r"\w+", command[2]))
            assert extras <= set(metadata("tpkernels").get_all("Provides-Extra") or ()), command
        else:
            assert command[0] == "tpkernels", f"{page}: no test runs {command}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_options_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for _, name, *options in tpkernels_commands(page):
        group.get_command(None, name).make_context(name, options)


@pytest.mark.parametrize(
    ("picture", "results"), [("llama", "cpu-2core-llama"), ("ops", "cpu-2core-ops")]
)
def test_pictures_show_measured_results(picture: str, results: str) -> None:
    path = f"docs/images/{picture}.svg"
    assert f"]({path})" in PAGES[0].read_text()
    assert path in (ROOT / f"benchmarks/results/{results}.md").read_text()
    assert ElementTree.parse(ROOT / path).getroot().tag.endswith("svg")


def test_messages_of_troubleshooting() -> None:
    """The first columns quote messages of the code, apart from numbers, quotes and "..."."""
    sources = [*(ROOT / "tpkernels").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    code = "".join(path.read_text() for path in sources)
    code = re.sub(r"""["']\s*f?["']""", "", code)  # joins adjacent literals
    rows = re.findall(r"^\| `(.+?)`", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    fragments = {
        fragment.strip(" ,#")
        for row in rows
        for fragment in re.split(r"\.\.\.|['\":;()\[\]]|\d+", row)
    }
    messages = {fragment for fragment in fragments if len(fragment.split()) > 2}
    assert len(rows) > 20 and not [fragment for fragment in messages if fragment not in code]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_contains_every_public_name(module: str) -> None:
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
    documented = set(
        re.findall(r"^\.\. auto(?:function|class|exception):: (?:\w+\.)*(\w+)$", reference, re.M)
    )
    public = importlib.import_module(f"tpkernels{module}")
    expected = {
        name for name in public.__all__ if not isinstance(getattr(public, name), ModuleType)
    }
    assert expected and expected <= documented, expected - documented


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_referenced_files_exist(page: Path) -> None:
    folders = r"(?:tpkernels|csrc|tests|benchmarks|examples|docs)"
    for path in re.findall(rf"`({folders}/[\w./]*)`", page.read_text()):
        assert (ROOT / path).exists() or "X." in path, f"{page}: {path}"
