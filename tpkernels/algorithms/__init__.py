"""Execution of planned calls: one file per algorithm, one function per family of ops."""
