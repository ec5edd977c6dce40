"""The stages of ``python -m benchmarks.gpu_suite``: each yields results as it goes."""
