"""Benchmarks of the ops. Every op is verified, then timed together with its baselines.

specs, sweep       ops on global shapes; the cases of `tpkernels bench`
cases              implementations of an op, and copies of its inputs
measuring, probes  verification and timing of a case on a rank; rates of the machine
results            statistics of a case, and the JSON lines
report, charts     the table in the terminal; the HTML report
"""
