"""What a rank does by itself: the local matmul, memory for results, ranges for profilers."""
