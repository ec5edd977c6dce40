"""Symmetric memory: buffers that every rank of a group can reach, and the signals that
synchronise access to them."""
