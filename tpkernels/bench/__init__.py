"""Measuring ops: the library behind the commands that verify and time them.

What is measured
    specs, sweep            ops on global shapes; sweeps by options, models and YAML files
    cases, inputs           one rank's data; enough copies of it to miss the cache
    baselines               what ops are compared with

How
    verification            results against float64
    measuring, roofline     one case on one rank; what the machine can reach
    tune                    the times that `auto` chooses by, and a machine's rates

What is kept and shown
    statistics, results     confidence intervals; result files
    report                  the table in the terminal, CSV, HTML and pictures
"""
