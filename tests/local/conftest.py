"""The fixture ``unit``: each vector unit of this processor, and the loops on tiles in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tpkernels import _C


@pytest.fixture(params=[*_C.host.vector_units(), "tiles"])
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.host.vector_unit()
    _C.host.use_vector_unit(request.param)
    yield request.param
    _C.host.use_vector_unit(before)
