"""Measuring: the library behind the commands of `tpkernels`.

One module per command:
run, compare, tune, profile, demo, info

What is measured:
specs, models, sweep      ops on global shapes, by options, models and YAML files
cases, inputs             one rank's data; enough copies of it to miss the cache
baselines                 what ops are compared with

How:
session                   ranks and their devices
verification              results against float64
benchmark, timing         `tpkernels.benchmark`; interleaved times of several variants
measuring, roofline       one case on one rank; what the machine can reach

What is kept and shown:
statistics, results       confidence intervals; the content of a result file
file                      the result file, and its validation by schema.json
table, report, plots      the table in the terminal; CSV and HTML; pictures
trace                     profiles of all ranks on one clock
options, output           values of command-line options; printing
"""
