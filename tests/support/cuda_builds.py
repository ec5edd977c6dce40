"""Reads compiled CUDA kernels with the tools in Triton's wheel."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Usage:
    """The resources that one kernel takes, according to the cubin."""

    registers: int
    stack: int
    local: int


@functools.cache
def dump(image: bytes, *options: str) -> str:
    """The output of cuobjdump for a fat binary or a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".fatbin") as file:
        file.write(image)
        file.flush()
        command = [TOOLS / "cuobjdump", *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def usage(image: bytes) -> dict[str, dict[str, Usage]]:
    """By architecture (sm_90) and kernel."""
    usages: dict[str, dict[str, Usage]] = {}
    arch = kernel = ""
    for line in dump(image, "-res-usage").splitlines():
        if match := re.match(r"arch = (sm_\d+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            kernel = match[1]
        elif match := re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", line):
            usages.setdefault(arch, {})[kernel] = Usage(*map(int, match.groups()))
    return usages


def ptx_of(image: bytes) -> str:
    """The PTX in a fat binary."""
    text = dump(image, "-ptx")
    return text[text.index(".version") :].partition("\nFatbin")[0]


@functools.cache
def kernels_of(ptx: str) -> dict[str, str]:
    """The PTX of each kernel."""
    parts = re.split(r"\.visible \.entry (\w+)\(", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


_NO_ACCESS = r"(?:(?!\b(?:ld|st|atom)\.)[\s\S])*"
# The record of a failure: who is first, what was seen, a word that tells the host to read it.
RECORD = _NO_ACCESS.join(
    (
        r"atom\.acq_rel\.gpu\.global\.cas\.b64",
        *(rf"st\.global\.u64 \[%rd\d+\+{at}\]" for at in (24, 32, 40)),
        r"st\.release\.sys\.global\.u64",
    )
)


def sass_of(image: bytes, arch: str) -> dict[str, str]:
    """The machine code of each kernel for an architecture."""
    parts = re.split(r"Function : (\w+)", dump(image, "-sass", "-arch", arch))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def assembled(ptx: str, arch: str) -> bytes:
    """PTX assembled to a cubin by the newer of Triton's two ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernels.ptx"), Path(folder, "kernels.cubin")
        source.write_text(ptx)
        ptxas = TOOLS / "ptxas-blackwell"
        command = [ptxas, f"-arch={arch}", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return target.read_bytes()
