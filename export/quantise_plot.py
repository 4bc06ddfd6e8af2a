"""Draw a trade-off: cost against loss, and where the chosen model stands."""

from __future__ import annotations

from pathlib import Path

from edgelin.export.quantise_auto import TradeOff

_COST = {"MB": "weights, MB", "ms": "matrices of one step here, ms"}
_LEAST = 1e-5  # nat; a logarithm knows no 0


def draw(trade_off: TradeOff, path: Path) -> None:
    """Write a PNG; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    costs, losses = zip(*trade_off.path, strict=True)
    axes.plot(costs, [max(x, _LEAST) for x in losses], ".-", color="0.6", label="best of each size")
    for name, (cost, loss) in trade_off.uniform.items():
        if name == "all float":
            continue
        axes.plot(cost, max(loss, _LEAST), "s", color="tab:blue")
        axes.annotate(name, (cost, max(loss, _LEAST)), (6, 6), textcoords="offset points")
    axes.axhline(trade_off.budget_kl, color="tab:red", linestyle="--", linewidth=1)
    axes.annotate(
        f"budget {trade_off.budget_kl:.3g} nat",
        (1, trade_off.budget_kl),
        (-4, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color="tab:red",
        ha="right",
    )
    cost, loss = trade_off.chosen
    axes.plot(cost, loss, "o", color="tab:orange", markersize=9, label="chosen, as foreseen")
    measured = max(trade_off.measured.kl, _LEAST)
    axes.plot(cost, measured, "*", color="tab:green", markersize=14, label="chosen, as measured")
    axes.set_yscale("log")
    axes.set_xlabel(_COST[trade_off.unit])
    axes.set_ylabel("KL from the float model, nat a token")
    axes.set_title("What each size costs" if trade_off.unit == "MB" else "What each speed costs")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    figure.savefig(path)
