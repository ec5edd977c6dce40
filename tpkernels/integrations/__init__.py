"""Plugins for third-party engines. ``import tpkernels`` imports neither plugins nor engines."""
