"""One matmul, and a collective that reads from all peers at once."""
