"""Choose the bits of every matrix: the cheapest model whose loss stays within a budget.

Every matrix has a few options (:mod:`edgelin.export.quantise.sensitivity`), each with a cost and a
loss. Both add up over matrices, so that the best models of all budgets lie on one path: begin with
the cheapest option of all, and again and again spend where a byte (or a microsecond) buys most,
along the lower convex hull of each matrix's options. (The relaxation of the multiple-choice
knapsack problem: Sinha and Zoltners, Operations Research 27 (1979), section 2.) The model that is
chosen is then rounded, and measured on text that it was not fitted to; if it costs more than was
foreseen, or much less, the path is entered again elsewhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edgelin.export.quantise.loss import Budget, Loss
from edgelin.export.quantise.recipe import Format, Recipe
from edgelin.export.quantise.rounding import Rounded
from edgelin.export.quantise.sensitivity import Option

_TRIES = 4
_GOOD = 0.8  # share of the budget that is worth no further try
_LEAST = 0.25  # share that a loss near zero counts as
_ROOM = 0.9


@dataclass(frozen=True)
class Point:
    """One model on the path.

    Args:
        cost: Bytes, or milliseconds a token.
        loss: Foreseen, in nat a token.
        formats: By the first parameter of what shares a format; None: float.
    """

    cost: float
    loss: float
    formats: Mapping[str, Format | None] = field(repr=False)


@dataclass(frozen=True)
class Choice:
    """A model that was rounded and measured.

    Args:
        point: Where on the path.
        recipe: The formats of its matrices.
        loss: What it costs.
        rounded: Its matrices.
    """

    point: Point
    recipe: Recipe
    loss: Loss
    rounded: Mapping[str, Rounded] = field(repr=False)


@dataclass(frozen=True)
class TradeOff:
    """What was to be chosen from.

    Args:
        unit: ``"MB"`` or ``"ms"``.
        budget_kl: In nat.
        path: Cost and foreseen loss of the models, from the cheapest to float.
        uniform: The same of models with one format, by its name.
        chosen: The model that was taken.
        measured: What it costs in torch, with rounded activations.
        sensitivity: Parameter to format to loss.
    """

    unit: str
    budget_kl: float
    path: list[tuple[float, float]]
    uniform: dict[str, tuple[float, float]]
    chosen: tuple[float, float]
    measured: Loss
    sensitivity: dict[str, dict[str, float]]

    @classmethod
    def of(
        cls,
        options: Mapping[str, list[Option]],
        cost: Callable[[str, Option], float],
        points: list[Point],
        choice: Choice,
        unit: str,
        rest: float,
    ) -> TradeOff:
        """Put together what there was to choose from: ``points`` of the path, to which all else
        adds the cost ``rest``."""
        total, sensitivity = dict[str, tuple[float, float]](), dict[str, dict[str, float]]()
        for name, own in options.items():
            sensitivity[name] = {_label(option.format): option.loss for option in own}
        for label, pick in _UNIFORM.items():
            taken = {name: pick(own) for name, own in options.items()}
            total[label] = (
                rest + sum(cost(name, option) for name, option in taken.items()),
                sum(option.loss for option in taken.values()),
            )
        return cls(
            unit,
            choice.recipe.budget_kl or 0.0,
            [(rest + point.cost, point.loss) for point in points],
            total,
            (rest + choice.point.cost, choice.point.loss),
            choice.loss,
            sensitivity,
        )

    def lines(self) -> list[str]:
        """For a terminal and the report."""
        rows = [*self.uniform.items(), ("chosen", self.chosen)]
        return [
            f"{name}: {cost:.4g} {self.unit}, {loss:.4f} nat foreseen"
            + (f", {self.measured.kl:.4f} measured" if name == "chosen" else "")
            for name, (cost, loss) in sorted(rows, key=lambda row: row[1][0])
        ]


def path(options: Mapping[str, list[Option]], cost: Callable[[str, Option], float]) -> list[Point]:
    """The best models, from the cheapest to the one without loss.

    Args:
        options: By matrix.
        cost: Of a matrix in one of its options.
    """
    hulls = {
        name: _hull([(cost(name, option), option) for option in own])
        for name, own in options.items()
    }
    taken = {name: hull[0] for name, hull in hulls.items()}
    steps = [
        (_slope(before, after), name, after)
        for name, hull in hulls.items()
        for before, after in itertools.pairwise(hull)
    ]
    points = [_point(taken)]
    # Slopes fall along each hull, so that the steps of a matrix keep their order.
    for _, name, after in sorted(steps, key=lambda step: -step[0]):
        taken[name] = after
        points.append(_point(taken))
    return points


def choose(
    points: list[Point],
    recipe: Recipe,
    budget: Budget,
    float_nats: float,
    attempt: Callable[[Recipe], tuple[Loss, Mapping[str, Rounded]]],
) -> Choice:
    """The cheapest model within the budget; if none was, the one that exceeds it least.

    Args:
        points: The path.
        recipe: What else is rounded.
        budget: The limits.
        float_nats: Of the float model, a token.
        attempt: Rounds by a recipe, and measures.
    """
    target, tried = budget.nats(float_nats), dict[int, Choice]()
    for _ in range(_TRIES):
        fitting = [i for i, point in enumerate(points) if point.loss <= target]
        index = min(fitting, key=lambda i: points[i].cost, default=len(points) - 1)
        if index in tried:
            break
        used = dataclasses.replace(recipe, matrices=dict(points[index].formats))
        loss, rounded = attempt(used)
        tried[index] = Choice(points[index], used, loss, rounded)
        spent = budget.spent(loss)
        if _GOOD <= spent <= 1:
            break
        target *= _ROOM / max(spent, _LEAST)

    def rank(choice: Choice) -> tuple[float, float]:
        return max(budget.spent(choice.loss), 1.0), choice.point.cost

    return min(tried.values(), key=rank)


def _label(chosen: Format | None) -> str:
    """A format in a word."""
    return "float" if chosen is None else f"int{chosen.bits}/{chosen.block_size}"


def _with(bits: int, *, largest: bool) -> Callable[[list[Option]], Option]:
    """The option of so many bits with the largest or the smallest blocks."""

    def pick(options: list[Option]) -> Option:
        sign = -1 if largest else 1
        own = [o for o in options if o.format is not None and o.format.bits == bits]
        return min(own, key=lambda o: sign * (o.format.block_size if o.format else 0))

    return pick


_UNIFORM: dict[str, Callable[[list[Option]], Option]] = {
    "all int4, large blocks": _with(4, largest=True),
    "all int4, blocks of 32": _with(4, largest=False),
    "all int8": _with(8, largest=True),
    "all float": lambda options: options[-1],
}


def _point(taken: Mapping[str, tuple[float, Option]]) -> Point:
    """The model of these options with their costs."""
    cost = math.fsum(cost for cost, _ in taken.values())
    loss = math.fsum(option.loss for _, option in taken.values())
    return Point(cost, loss, {name: option.format for name, (_, option) in taken.items()})


def _hull(options: list[tuple[float, Option]]) -> list[tuple[float, Option]]:
    """Options on the lower convex hull of loss over cost, from the cheapest on."""
    kept: list[tuple[float, Option]] = []
    for one in sorted(options, key=lambda pair: (pair[0], pair[1].loss)):
        if kept and one[1].loss >= kept[-1][1].loss:
            continue
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= _slope(kept[-1], one):
            kept.pop()
        kept.append(one)
    return kept


def _slope(before: tuple[float, Option], after: tuple[float, Option]) -> float:
    """Loss that a unit of cost saves."""
    return (before[1].loss - after[1].loss) / max(after[0] - before[0], 1e-12)
