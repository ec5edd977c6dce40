"""Measuring: the library behind ``tpkernels bench``, ``compare``, ``tune`` and ``profile``.

cases, specs, sweep, models   what is measured; refuses what cannot be
session, device, inputs       ranks, their devices, inputs that are in no cache
verification, baselines       whether results are right; what they are measured beside
timing, measuring, roofline   times by turns; what the machine can reach
benchmark, statistics         `tpkernels.benchmark`; what samples say
results, file, validation     the figures, the file they are kept in, whether a file holds a report
run, table, plots, page       the loop over the cases; how it is shown
tuning                        the algorithms of one case, for ``tpkernels tune``
recording, trace, timeline    profiles of all ranks on one clock
"""
