"""Defaults of ``tpkernels.init``, and the options of a process."""

import functools
import os

TIMEOUT = 30.0  # s, for one wait on the host
LONGEST_TIMEOUT = 86400.0  # s
WORKSPACE_BYTES = 64 << 20  # limit for each of the two data buffers of a rank
AUTOTUNE: bool | None = None

PYTHON_VARIABLE = "TPKERNELS_PYTHON_CALLS"


@functools.cache
def python_calls() -> bool:
    """Return whether every call goes through torch's dispatcher and Python, as the environment
    asks: no key sets are read from torch's memory, and no call is run by the extension alone.

    Raises:
        ValueError: the variable holds neither 0 nor 1.
    """
    text = os.environ.get(PYTHON_VARIABLE, "0")
    if text not in ("0", "1"):
        raise ValueError(
            f"{PYTHON_VARIABLE} is {text!r}; it must be 0, or 1 to run every call in Python"
        )
    return text == "1"
