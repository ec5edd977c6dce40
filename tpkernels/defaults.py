"""Defaults of ``tpkernels.init``."""

TIMEOUT = 30.0  # s, for one wait
WORKSPACE_BYTES = 64 << 20  # limit for each of the two data buffers of a rank
AUTOTUNE = True
