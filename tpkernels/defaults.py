"""Defaults of ``tpkernels.init``, and the options of a process."""

import functools
import os

TIMEOUT = 30.0  # s, for one wait on the host
LONGEST_TIMEOUT = 86400.0  # s
WORKSPACE_BYTES = 64 << 20  # limit for each of the two data buffers of a rank
AUTOTUNE: bool | None = None

RESULT_POOL_BYTES = 256 << 20  # limit for the memory that is kept for results
POOL_VARIABLE = "TPKERNELS_RESULT_POOL_BYTES"
PYTHON_VARIABLE = "TPKERNELS_PYTHON_CALLS"


def result_pool_bytes() -> int:
    """Return the limit from the environment, or its default; 0 turns the pool off.

    Raises:
        ValueError: the variable holds no number of bytes.
    """
    text = os.environ.get(POOL_VARIABLE)
    if text is None:
        return RESULT_POOL_BYTES
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ValueError(
            f"{POOL_VARIABLE} is {text!r}; set it to a number of bytes, such as "
            f"{RESULT_POOL_BYTES}, or to 0 to turn the pool off"
        )
    return int(text)


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
            f"{PYTHON_VARIABLE} is {text!r}; set it to 1 to make every call in Python, or to 0"
        )
    return text == "1"
