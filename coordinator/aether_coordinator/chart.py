"""The picture of a run: training reward by step, held-out accuracy at the policies that were evaluated."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from aether_common.files import write_durably

from aether_coordinator.status import StepStatus
from aether_coordinator.summary import WINDOW, Estimate, moving_average

SIZE_INCHES = (9.0, 5.0)
DPI = 120
_REWARD = "#3b6fb6"
_HELD_OUT = "#d1603d"


def draw_rewards(path: Path, steps: Sequence[StepStatus], held_out: Mapping[int, Estimate], title: str) -> None:
    """Write the reward curve as a PNG; `held_out` maps policy versions to accuracy."""
    # Here and not above: matplotlib costs a second that no other command should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    numbers = [step.step for step in steps]
    rewards = [step.reward for step in steps]
    axes.plot(
        numbers, rewards, "o", color=_REWARD, alpha=0.4, markersize=6, markeredgewidth=0, label="training reward, step"
    )
    axes.plot(
        numbers,
        moving_average(rewards),
        color=_REWARD,
        linewidth=2.2,
        label=f"training reward, mean of up to {WINDOW} steps",
    )
    for position, (version, accuracy) in enumerate(sorted(held_out.items())):
        axes.errorbar(
            [version],
            [accuracy.mean],
            yerr=[[accuracy.mean - max(0.0, accuracy.low)], [min(1.0, accuracy.high) - accuracy.mean]],
            fmt="D",
            color=_HELD_OUT,
            markersize=8,
            capsize=4,
            linewidth=1.5,
            zorder=3,
            label="held-out exact match, 95 % interval" if position == 0 else None,
        )
        axes.annotate(
            f"{accuracy.mean:.2f}",
            (version, min(1.0, accuracy.high)),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            color=_HELD_OUT,
            fontweight="bold",
        )
    last = max([*numbers, *held_out, 1])
    axes.set_xlim(-0.03 * last, last * 1.04)
    axes.set_ylim(-0.02, 1.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=14))
    axes.set_xlabel("training step (held-out: policy version)")
    axes.set_ylabel("share of right answers")
    axes.set_title(title, loc="left", fontsize=12)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if steps or held_out:
        # Outside: wherever it lay inside, some run's curve would pass under it.
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    write_durably(path, picture.getvalue())
