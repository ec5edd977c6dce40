"""What kernels say where they cannot run."""

from __future__ import annotations

import numpy
import pytest
import triton

from tpkernels import kernels


@pytest.mark.parametrize(
    ("of_triton", "of_numpy", "works"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0", "2.4.0", False),
        ("3.6.0", "2.5.2", False),
        ("3.7.0", "2.4.6", True),
        ("3.10.0+git1", "2.10.0", True),
    ],
)
def test_versions_whose_interpreter_fails_are_named(
    monkeypatch: pytest.MonkeyPatch, of_triton: str, of_numpy: str, works: bool
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "__version__", of_triton)
    monkeypatch.setattr(numpy, "__version__", of_numpy)
    why = kernels.unsupported.__wrapped__("cpu")
    assert (why is None) == works
    for part in () if works else (of_triton, of_numpy, "pip install 'numpy<2.4'"):
        assert part in why, why
