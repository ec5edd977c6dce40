"""What a rank's first operator of DTensor, and its first compiled function, import: the fork server
of the tests imports it once. Without Triton, which asks when it is imported whether to interpret
kernels: the environment of a rank says that."""

import sys

sys.modules["triton"] = None  # type: ignore[assignment]
import torch._dynamo  # noqa: E402, F401
from torch.utils import _triton  # noqa: E402

del sys.modules["triton"]
_triton.has_triton_package.cache_clear()
