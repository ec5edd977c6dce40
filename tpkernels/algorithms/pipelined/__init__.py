"""One matmul per peer, overlapped with the work of the peers."""
