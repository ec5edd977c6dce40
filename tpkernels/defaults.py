"""What groups are set up with unless ``tpkernels.init`` is told otherwise."""

TIMEOUT = 30.0  # s, of one wait
WORKSPACE_BYTES = 64 << 20  # what each of the two data buffers of a rank may grow to
