"""Draw a trade-off: cost against loss, and where the chosen model stands."""

from __future__ import annotations

from pathlib import Path

from edgelin.export.quantise.auto import TradeOff

_COST = {"MB": "weights, MB", "ms": "matrices of one step here, ms"}
_SHOWN = 1e-4  # of the largest loss; a logarithm knows no 0


def draw(trade_off: TradeOff, path: Path) -> None:
    """Write a PNG; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    least = max(_SHOWN * max(loss for _, loss in trade_off.path), 1e-12)
    shown = [point for point in trade_off.path if point[1] >= least]
    costs, losses = [cost for cost, _ in shown], [loss for _, loss in shown]
    axes.plot(costs, losses, ".-", color="0.6", label="least loss of each cost")
    above = True  # neighbours' names do not meet
    for name, (cost, loss) in trade_off.uniform.items():
        if loss >= least:
            axes.plot(cost, loss, "s", color="tab:blue")
            place = (8, 8) if above else (10, -4)
            axes.annotate(name, (cost, loss), place, textcoords="offset points")
            above = not above
    axes.axhline(trade_off.budget_kl, color="tab:red", linestyle="--", linewidth=1)
    axes.annotate(
        f"budget, about {trade_off.budget_kl:.3g} nat",
        (1, trade_off.budget_kl),
        (-4, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color="tab:red",
        ha="right",
    )
    cost, loss = trade_off.chosen
    axes.plot(
        cost, max(loss, least), "o", color="tab:orange", markersize=9, label="chosen, as foreseen"
    )
    measured = max(trade_off.measured.kl, least)
    axes.plot(cost, measured, "*", color="tab:green", markersize=14, label="chosen, as measured")
    axes.set_yscale("log")
    axes.set_ylim(top=2 * max(trade_off.budget_kl, measured, *losses))
    axes.set_xlabel(_COST[trade_off.unit])
    axes.set_ylabel("KL from the float model, nat a token")
    axes.set_title("What each size costs" if trade_off.unit == "MB" else "What each speed costs")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    figure.savefig(path)
