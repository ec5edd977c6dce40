"""Measuring ops: the library behind the commands that verify and time them.

specs, sweep          ops on global shapes; sweeps by options, models and YAML files
cases                 one rank's data, and enough copies of it to miss the cache
verification          results against float64
measuring, probes     one case and its baselines on one rank; what the machine can reach
statistics, results   confidence intervals; result files
report                the table, in the terminal and as text
"""
