"""Symmetric memory: buffers that all ranks of a group can address, and the signals that
synchronise access to them."""
