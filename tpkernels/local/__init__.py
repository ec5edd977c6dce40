"""What a rank does alone: the local matmul, packed weights, a caller's product, memory for results,
profiler ranges."""
