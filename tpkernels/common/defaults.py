"""Defaults of ``tpkernels.init``."""

TIMEOUT = 30.0  # s, for one wait on the host
LONGEST_TIMEOUT = 86400.0  # s
WORKSPACE_BYTES = 64 << 20  # limit for each of the two data buffers of a rank
AUTOTUNE: bool | None = None
