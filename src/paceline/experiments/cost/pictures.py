"""The pictures of docs/cost.md, from the functions alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.experiments.cost.estimate import cost
from paceline.experiments.cost.hardware import HARDWARE
from paceline.experiments.cost.optimizer import PRESETS
from paceline.experiments.cost.shape import SHAPES
from paceline.experiments.cost.tables import SIDE_BY_SIDE, usual
from paceline.experiments.report.palette import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT, _GRID = "#1c1e21", "#5c6067", "#ebebe7"
_MANY = tuple(2**i for i in range(3, 15))
_SHOWN = ("PACE float32", "PACE bfloat16", "PACE int8")
_PARTS = ("weights", "gradients", "moments", "averages", "activations", "temporaries")


def draw(folder: Path) -> list[Path]:
    """All of them into PNG files."""
    made = [
        _figure(folder / "cost-memory.png", (_bars, _memory_over_gpus)),
        _figure(folder / "cost-time.png", (_time_over_gpus, _share_over_tokens)),
    ]
    return made


def _figure(path: Path, panels: tuple[Callable[["Axes"], None], ...]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.6), dpi=130, layout="constrained", facecolor="white")
    for i, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), i)
        axes.grid(color=_GRID)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(colors=_SOFT, labelsize=8.5)
        panel(axes)
        if axes.get_legend() is None:
            axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)
    figure.savefig(path, metadata={"Software": None})
    return path


def _labels(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK)
    axes.set_xlabel(x, fontsize=9, color=_INK)
    axes.set_ylabel(y, fontsize=9, color=_INK)


def _bars(axes: "Axes") -> None:
    names = list(SIDE_BY_SIDE)
    bottoms = [0.0] * len(names)
    for i, part in enumerate(_PARTS):
        sizes = [getattr(cost(usual("70b", 16, each)).memory, part) / 1e9 for each in SIDE_BY_SIDE.values()]
        if not any(sizes):
            continue
        axes.barh(names, sizes, left=bottoms, color=style(i).on_light, label=part)
        bottoms = [a + b for a, b in zip(bottoms, sizes, strict=True)]
    axes.axvline(HARDWARE["h200"].memory / 1e9, color=_INK, linewidth=1, linestyle="--")
    axes.text(HARDWARE["h200"].memory / 1e9 + 2, 0, "H200", fontsize=8, va="center", color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 165)
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.12), "ncols": 6}
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, handlelength=1, columnspacing=1, **below)
    _labels(axes, "70B on 16 GPUs, FSDP2", "GB on the fullest GPU", "")


def _memory_over_gpus(axes: "Axes") -> None:
    for i, model in enumerate(("8b", "70b", "405b")):
        for name, dashes in (("AdamW", (4, 2)), ("PACE float32", ()), ("PACE int8", (1, 1))):
            sizes = [cost(usual(model, n, SIDE_BY_SIDE[name])).memory.kept / 1e9 for n in _MANY]
            label = f"{model}, {name}"
            more: dict[str, Any] = {"dashes": dashes} if dashes else {}
            axes.plot(_MANY, sizes, color=style(i).on_light, linewidth=1.7, label=label, **more)
    axes.axhline(HARDWARE["h200"].memory / 1e9, color=_INK, linewidth=1, linestyle="--")
    axes.text(16384, HARDWARE["h200"].memory / 1e9 * 1.15, "H200", fontsize=8, ha="right", color=_INK)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, loc="lower left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([8, 64, 512, 4096, 16384], ["8", "64", "512", "4,096", "16,384"])
    _labels(axes, "Weights and state, FSDP2 over all GPUs", "GPUs", "GB on the fullest GPU")


def _time_over_gpus(axes: "Axes") -> None:
    for i, name in enumerate(_SHOWN):
        for model, dashes in (("8b", (4, 2)), ("70b", ())):
            over = []
            for n in _MANY:
                base = cost(usual(model, n, PRESETS["adamw"])).step_seconds
                over.append(100 * (cost(usual(model, n, SIDE_BY_SIDE[name])).step_seconds / base - 1))
            label = f"{model}, {name}"
            more: dict[str, Any] = {"dashes": dashes} if dashes else {}
            axes.plot(_MANY, over, color=style(i).on_light, linewidth=1.7, label=label, **more)
    axes.axhline(0, color=_INK, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([8, 64, 512, 4096, 16384], ["8", "64", "512", "4,096", "16,384"])
    _labels(axes, "A step beside AdamW's: one sequence a GPU", "GPUs", "time over AdamW's, %")


def _share_over_tokens(axes: "Axes") -> None:
    lengths = tuple(2**i for i in range(0, 8))
    for i, model in enumerate(("1b", "8b")):
        for name, dashes in (("AdamW", (4, 2)), ("PACE float32", ())):
            shares = []
            for many in lengths:
                one = usual(model, 8, SIDE_BY_SIDE[name])
                shares.append(100 * cost(replace(one, accumulate=many)).optimizer_share)
            more: dict[str, Any] = {"dashes": dashes} if dashes else {}
            tokens = [SHAPES[model].length * many for many in lengths]
            axes.plot(
                tokens, shares, color=style(i).on_light, linewidth=1.7, label=f"{model}, {name}", **more
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**13, 2**15, 2**17, 2**19], ["8k", "32k", "128k", "512k"])
    axes.set_ylim(0)
    _labels(axes, "8 GPUs: the optimizer's share", "tokens of a step on each GPU", "share of the step, %")
