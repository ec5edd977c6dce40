"""Benchmarks of the ops: every result is verified, then timed next to its baselines.

specs, sweep         ops on global shapes; the cases that the options of `tpkernels bench` name
cases, verification  one rank's data, each implementation of an op, and the float64 check
measuring, probes    one case on one rank; the rates that this machine reaches
results              statistics of a case, and the JSON lines
report, charts       the table in the terminal; the HTML report
"""
