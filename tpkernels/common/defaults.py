"""Defaults of ``tpkernels.init``."""

TIMEOUT = 30.0  # seconds, for a wait on the host
MAX_TIMEOUT = 86400.0  # seconds
WORKSPACE_BYTES = 64 << 20  # limit for each of the two data buffers of a rank
AUTOTUNE: bool | None = None
