"""Read compiled CUDA kernels with the tools of the Triton wheel."""

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
    """Resources of one kernel, as listed in the cubin."""

    registers: int
    stack: int
    local: int


@functools.cache
def dump(image: bytes, *options: str) -> str:
    """Return the output of cuobjdump for a fat binary or a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".fatbin") as file:
        file.write(image)
        file.flush()
        command = [TOOLS / "cuobjdump", *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def usage(image: bytes) -> dict[str, dict[str, Usage]]:
    """Return the resources by architecture (sm_90) and kernel."""
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


def get_ptx(image: bytes) -> str:
    """Return the PTX in a fat binary."""
    output = dump(image, "-ptx")
    return output[output.index(".version") :].partition("\nFatbin")[0]


@functools.cache
def split_kernels(ptx: str) -> dict[str, str]:
    """Return the PTX of each kernel."""
    sections = re.split(r"\.visible \.entry (\w+)\(", ptx)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


_NO_ACCESS = r"(?:(?!\b(?:ld|st|atom)\.)[\s\S])*"
# Failure record: elect the first program, store the mismatch, signal the host.
FAILURE_RECORD = _NO_ACCESS.join(
    (
        r"atom\.acq_rel\.gpu\.global\.cas\.b64",
        *(rf"st\.global\.u64 \[%rd\d+\+{offset}\]" for offset in (24, 32, 40)),
        r"st\.release\.sys\.global\.u64",
    )
)


def get_sass(image: bytes, arch: str) -> dict[str, str]:
    """Return the machine code of each kernel for an architecture."""
    sections = re.split(r"Function : (\w+)", dump(image, "-sass", "-arch", arch))
    return dict(zip(sections[1::2], sections[2::2], strict=True))


def assemble(ptx: str, arch: str) -> bytes:
    """Assemble PTX to a cubin with the newer of the two ptxas in Triton."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernels.ptx"), Path(folder, "kernels.cubin")
        source.write_text(ptx)
        ptxas = TOOLS / "ptxas-blackwell"
        command = [ptxas, f"-arch={arch}", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return target.read_bytes()
