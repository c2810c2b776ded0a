"""What the benchmarks share: both sides of a ratio in turn, medians, a table, and one JSON line at the end."""

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path


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


@asynccontextmanager
async def child(*arguments: str, log: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A process with pipes on stdin and stdout; what it says on stderr is shown when the block fails."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, limit=1 << 20
        )
    try:
        yield process
    except BaseException:
        sys.stderr.write(log.read_text()[-2000:])
        raise
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
