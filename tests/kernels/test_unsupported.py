"""Reasons why the kernels cannot run."""

from __future__ import annotations

import numpy
import pytest
import triton

from tpkernels import kernels


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "works"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0", "2.4.0", False),
        ("3.6.0", "2.5.2", False),
        ("3.7.0", "2.4.6", True),
        ("3.10.0+git1", "2.10.0", True),
    ],
)
def test_unsupported_versions_are_named(
    monkeypatch: pytest.MonkeyPatch, triton_version: str, numpy_version: str, works: bool
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(numpy, "__version__", numpy_version)
    reason = kernels.unsupported.__wrapped__("cpu")
    assert (reason is None) == works
    for phrase in () if works else (triton_version, numpy_version, "pip install 'numpy<2.4'"):
        assert phrase in reason, reason
