"""The command line of the gallery: a table of verified and timed problems."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from examples.parallel_kernel_bench import __doc__ as description
from examples.parallel_kernel_bench.gallery import PROBLEMS, Problem, ProblemResult, examine
from tpkernels.launch.session import is_leader, open_session, world_size
from tpkernels.launch.terminal import (
    UsageError,
    console,
    milliseconds,
    require_at_least,
    table,
    writable,
)
from tpkernels.timing import summary

WORLDS = (2, 4, 8)
HEAD = ("problem", "reference ms", "tpkernels ms", "speed-up", "error", "what")


def select_problems(selectors: Sequence[str]) -> list[Problem]:
    """Return the selected problems, by default all.

    A selector is a number, a name or both, such as 13_gemm_allreduce.
    """
    selection = []
    for selector in selectors or map(str, sorted(PROBLEMS)):
        number, _, name = selector.partition("_") if selector[:1].isdigit() else ("", "", selector)
        matching = [p for p in PROBLEMS.values() if number in ("", str(p.number))]
        matching = [p for p in matching if name in ("", p.name)]
        if not selector or not matching:
            names = ", ".join(f"{p.number}_{p.name}" for _, p in sorted(PROBLEMS.items()))
            raise UsageError(
                f"--only {selector} matches no problem; expected numbers or names of {names}"
            )
        selection += matching
    return selection


def row(ranks: Sequence[ProblemResult]) -> tuple[str, ...]:
    """Return the table cells of a problem: median times of the slowest rank, and largest error."""
    problem, error = PROBLEMS[ranks[0].number], max(result.error for result in ranks)
    baseline, ours = (
        summary([result.samples[name] for result in ranks]).median for name in ("reference", "ours")
    )
    error_cell = "WRONG" if error > 1 else f"{error:.2f}" if error else "0"
    times = (milliseconds(baseline), milliseconds(ours), f"{baseline / ours:.2f}x")
    return (f"{problem.number} {problem.name}", *times, error_cell, problem.description)


def report(rows: Sequence[Sequence[str]], title: str, out: Path | None) -> int:
    """Print the table and write it to ``out``. Returns the exit code, 1 for a wrong result."""
    grid = table(HEAD[0], HEAD[1:-1], HEAD[-1])
    for cells in rows:
        grid.add_row(*cells)
    ratios = [float(cells[3].rstrip("x")) for cells in rows]
    slower, wrong = sum(r < 1 for r in ratios), [cells[0] for cells in rows if cells[4] == "WRONG"]
    end = (
        f"Median speed-up {statistics.median(ratios):.2f}x; {slower} of {len(rows)} are slower "
        "than the reference. error: largest error over its bound; 0: bitwise identical."
    )
    end += f" WRONG: {', '.join(wrong)}." if wrong else ""
    console().print(title, grid, end, sep="\n")
    if out is not None:
        lines = [HEAD, ("---", *4 * ["---:"], "---"), *rows]
        grid_rows = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        out.write_text(f"{title}\n\n{grid_rows}\n\n{end}\n")
    return bool(wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.parallel_kernel_bench",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tp", "--nproc", type=int, help="number of ranks: 2, 4 or 8 (default: 2, or WORLD_SIZE)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="numbers or names of the problems to run"
    )
    parser.add_argument("--size", choices=["small", "full"], default="full", help="size of inputs")
    parser.add_argument("--repeat", type=int, default=15, help="maximum repetitions per problem")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    options = parser.parse_args(arguments)
    try:
        require_at_least(1, repeat=options.repeat)
        problems, world = select_problems(options.only), world_size(options.tp, 2)
        if world not in WORLDS:
            raise UsageError(
                f"--tp is {world}; expected one of {WORLDS}, which divide the inputs evenly"
            )
        out = None if options.out is None else writable(options.out)
    except UsageError as error:
        parser.error(str(error))
    rows = []
    with open_session(world, threads=1, timeout=600) as run, console().status("") as status:
        for problem in problems:
            status.update(f"{problem.number} {problem.name}")
            full = options.size == "full"
            rows.append(row(run(examine, problem.number, full, options.repeat)))
    title = f"{len(rows)} problems on {world} ranks x 1 thread, {options.size} size, float32."
    return report(rows, title, out) if is_leader() else 0


if __name__ == "__main__":
    raise SystemExit(main())
