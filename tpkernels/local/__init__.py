"""What a rank does alone: the local matmul, memory for results, profiler ranges."""
