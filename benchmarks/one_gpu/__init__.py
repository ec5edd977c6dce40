"""What one GPU can prove and measure within five minutes.

    python -m benchmarks.one_gpu                   # on a GPU; results in $OUT
    python -m benchmarks.one_gpu --rehearse        # on CPUs: interpreter and emulated driver
    python -m benchmarks.one_gpu --stub LIBCUDA    # without a GPU: fill Triton's cache

README.md says how to prepare, run and read it. The modules:

    __main__     the command: runs the stages one after the other
    stages       a stage: cases in a process with deadlines, restarted after a crash or a hang
    machine      the GPU, or what replaces it in a rehearsal and for the stub
    report       the summary, the JSON file and the Markdown page

and one module for each stage, whose `cases(machine)` yields names and functions.
"""
