"""One matmul per peer, overlapped with the peers' own work."""
