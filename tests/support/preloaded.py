"""Import the modules that torch would import for the first DTensor operator, and for the first
compiled function, of a rank.

The fork server of the tests imports this module once. It must not import Triton: on import, Triton
reads from the environment whether to interpret kernels, and the ranks have different environments.
"""

import sys

sys.modules["triton"] = None  # type: ignore[assignment]
import torch._dynamo  # noqa: E402, F401
from torch.utils import _triton  # noqa: E402

del sys.modules["triton"]
_triton.has_triton_package.cache_clear()
