"""Checks and measurements on a single GPU, in five minutes.

    python -m benchmarks.one_gpu                   # on a GPU; results in $OUT
    python -m benchmarks.one_gpu --rehearse        # on CPUs: interpreter and emulated driver
    python -m benchmarks.one_gpu --stub LIBCUDA    # without a GPU: fill Triton's cache

README.md describes preparation, runs and results. The modules:

    __main__     the command, runs the stages in order
    stages       a stage: cases in a process with deadlines, restarted after a crash or a hang
    machine      the GPU, or its replacement in a dry run or with the stub
    cache        the Triton cache
    report       the summary, the JSON file and the Markdown page

Each stage has a module with a function `cases(machine)`, a generator of names and functions.
"""
