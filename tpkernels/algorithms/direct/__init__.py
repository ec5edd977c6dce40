"""One matmul, and a collective that reads all peers simultaneously."""
