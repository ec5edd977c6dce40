"""Local work of a rank: matmul, packed and opaque weights, result memory, profiler ranges."""
