"""What the benchmarks share: both sides of a ratio in turn, medians, a table, and one JSON line at the end."""

import json
import statistics
from collections.abc import Awaitable, Callable, Sequence


async def interleaved(
    rounds: int, **sides: Callable[[], Awaitable[dict[str, float]]]
) -> dict[str, list[dict[str, float]]]:
    """Run every side once per round, in alternating order; the figures of each side, round by round."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            figures[name].append(await sides[name]())
    return figures


def median(rounds: Sequence[dict[str, float]], figure: str) -> float:
    return statistics.median(values[figure] for values in rounds)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """The first column to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([row[0].ljust(len(first)), *others]))


def finish(name: str, *, ratio: float, goal: float, ok: bool, **figures: object) -> None:
    """The last line of a benchmark."""
    print(json.dumps({"name": name, **figures, "ratio": round(ratio, 4), "goal": goal, "ok": ok}), flush=True)
