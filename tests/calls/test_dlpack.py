"""The structs in csrc/calls/dlpack.h match the torch header."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import tpkernels
from tests.support.paths import ROOT
from tests.support.processes import python
from tests.support.ranked import fresh_group, on_ranks
from tpkernels.ops.column_matmul import column_matmul

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "dlpack.h"
# torch struct: (our struct, members). ``a=b``: torch member a is our member b.
MEMBERS = {
    "DLTensor": ("Tensor", "data device ndim dtype shape strides"),
    "DLDataType": ("DataType", "code bits lanes"),
    "DLDevice": ("Device", "device_type=type device_id=index"),
    "DLPackVersion": ("Version", "major minor"),
    "DLPackExchangeAPI": (
        "ExchangeApi",
        "header.version=version header.prev_api=previous current_work_stream=current_stream "
        "managed_tensor_to_py_object_no_sync=owned_to_python "
        "dltensor_from_py_object_no_sync=tensor_from_python",
    ),
}


def check_source() -> str:
    lines = [
        f'#include "{HEADER}"',
        '#include "calls/dlpack.h"',
        "#include <cstddef>",
        "namespace own = tpkernels::calls::dlpack;",
        "static_assert(own::kMajorVersion == DLPACK_MAJOR_VERSION && own::kCpu == kDLCPU);",
        "static_assert(own::kFloat == kDLFloat && own::kBFloat == kDLBfloat);",
    ]
    for struct, (ours, members) in MEMBERS.items():
        lines.append(f"static_assert(sizeof({struct}) == sizeof(own::{ours}));")
        for pair in members.split():
            member, _, alias = pair.partition("=")
            offsets = f"offsetof({struct}, {member}) == offsetof(own::{ours}, {alias or member})"
            lines.append(f"static_assert({offsets});")
    return "\n".join([*lines, ""])


@pytest.mark.skipif(not HEADER.exists(), reason="this torch has no headers")
def test_our_structs_match_the_header(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]}")
    program = tmp_path / "check.cpp"
    for source, compiles in (
        (check_source(), True),
        (check_source().replace("own::Tensor, ndim)", "own::Tensor, dtype)"), False),
    ):
        program.write_text(source)
        command = [*compiler, "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", str(program)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode == 0) == compiles, result.stderr


def test_torch_has_the_interface() -> None:
    assert tpkernels._C.calls.open_exchange(torch.Tensor)
    assert not tpkernels._C.calls.open_exchange(int)


@pytest.mark.thorough
def test_a_torch_without_the_interface_is_refused() -> None:
    code = "import torch; del torch.Tensor.__dlpack_c_exchange_api__; import tpkernels"
    result = python("-c", code)
    assert result.returncode == 1
    assert "ImportError: torch" in result.stderr and "needs 2.11 or later" in result.stderr


def test_tensors_without_materialized_values() -> None:
    """Negative views and zeros without memory are resolved, also in lists, which the dispatcher
    skips if they are optional."""
    x, w, bias = torch.ones(4, 64), torch.ones(64, 64).t(), torch.ones(64)
    for lazy_bias in (torch._neg_view(bias), torch._efficientzerotensor((64,))):
        got = torch.ops.tpkernels._matmul(x, w, bias=lazy_bias)
        assert torch.equal(got, x @ w + lazy_bias)


@on_ranks(2)
def test_negative_views_among_biases() -> None:
    x, w, bias = torch.ones(4, 64), torch.ones(64, 64).t(), torch.ones(64)
    negative = torch._neg_view(bias)
    with fresh_group() as group:
        for algorithm in ("direct", "pipelined", "unfused"):
            options = {"algorithm": algorithm}
            got = tpkernels.all_gather_matmul(x, w, group, biases=negative, **options)
            assert torch.equal(got, torch.full((8, 64), 63.0)), algorithm
        (got,) = column_matmul(x, [w], group, [negative])
        assert torch.equal(got, torch.full((4, 64), 63.0)), "column_matmul"
