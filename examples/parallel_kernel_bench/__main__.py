"""The command line of the gallery: a table of verified and timed problems."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from examples.parallel_kernel_bench import __doc__ as description
from examples.parallel_kernel_bench.gallery import PROBLEMS, Examined, Problem, examine
from tpkernels.launch.session import is_leader, open_session, world_size
from tpkernels.launch.terminal import UsageError, at_least, console, milliseconds, table, writable
from tpkernels.timing import summary

WORLDS = (2, 4, 8)
HEAD = ("problem", "reference ms", "tpkernels ms", "speed-up", "error", "what")


def selected(words: Sequence[str]) -> list[Problem]:
    """Return the problems with these numbers, names or both, such as 13_gemm_allreduce; by default
    all."""
    found = []
    for word in words or map(str, sorted(PROBLEMS)):
        number, _, name = word.partition("_") if word[:1].isdigit() else ("", "", word)
        matching = [p for p in PROBLEMS.values() if number in ("", str(p.number))]
        matching = [p for p in matching if name in ("", p.name)]
        if not word or not matching:
            names = ", ".join(f"{p.number}_{p.name}" for _, p in sorted(PROBLEMS.items()))
            raise UsageError(
                f"--only {word} matches no problem; expected numbers or names of {names}"
            )
        found += matching
    return found


def row(ranks: Sequence[Examined]) -> tuple[str, ...]:
    """Return the cells of a problem's row: the slowest rank's median times, the worst error."""
    of, error = PROBLEMS[ranks[0].number], max(each.error for each in ranks)
    theirs, ours = (
        summary([each.samples[name] for each in ranks]).median for name in ("reference", "ours")
    )
    shown = "WRONG" if error > 1 else f"{error:.2f}" if error else "0"
    times = (milliseconds(theirs), milliseconds(ours), f"{theirs / ours:.2f}x")
    return (f"{of.number} {of.name}", *times, shown, of.what)


def report(rows: Sequence[Sequence[str]], title: str, out: Path | None) -> int:
    """Print the table, write it to ``out``, and return the exit code: 1 if a result is wrong."""
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
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        out.write_text(f"{title}\n\n{text}\n\n{end}\n")
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
        at_least(1, repeat=options.repeat)
        problems, world = selected(options.only), world_size(options.tp, 2)
        if world not in WORLDS:
            raise UsageError(
                f"--tp is {world}; expected one of {WORLDS}, which divide the inputs evenly"
            )
        out = None if options.out is None else writable(options.out)
    except UsageError as error:
        parser.error(str(error))
    rows = []
    with open_session(world, threads=1, timeout=600) as run, console().status("") as status:
        for each in problems:
            status.update(f"{each.number} {each.name}")
            full = options.size == "full"
            rows.append(row(run(examine, each.number, full, options.repeat)))
    title = f"{len(rows)} problems on {world} ranks x 1 thread, {options.size} size, float32."
    return report(rows, title, out) if is_leader() else 0


if __name__ == "__main__":
    raise SystemExit(main())
