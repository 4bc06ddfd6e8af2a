"""Decide, before a graph is written, how its matrices are rounded: by role, text or budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from tqdm import tqdm

from edgelin.errors import EdgelinError
from edgelin.export.quantise.auto import TradeOff, choose, path
from edgelin.export.quantise.calibrate import calibrate
from edgelin.export.quantise.loss import Budget, Loss, Text
from edgelin.export.quantise.nodes import Matrices, matrices, round_parameter
from edgelin.export.quantise.recipe import FLOAT, METHODS, Format, Recipe
from edgelin.export.quantise.rounding import Rounded
from edgelin.export.quantise.sensitivity import Option, options, size
from edgelin.export.quantise.speed import Timer
from edgelin.mapped import Empty, release

if TYPE_CHECKING:
    from edgelin.model import SequenceModel
    from edgelin.runtimes.session import Bundle

MINIMISE = ("size", "time")
_FINE = Format(4, 32)
# Of auto: bits per byte hardly tell what rounding does to first choices, of which other texts may
# keep a point less.
_RELATIVE, _TOP1 = 0.02, 0.93


@dataclass(frozen=True)
class Calibration:
    """What rounding may read and cost.

    Args:
        text: Text of the kind that the model will read.
        method: One of ``METHODS``.
        budget: Relative loss in bits per byte that a quantised variant may have.
        budget_kl: The same as a KL, in nat a token.
        budget_top1: Least share of positions whose first choice is still the float model's.
        minimise: ``"size"`` or ``"time"``: what ``--quantize auto`` saves.
    """

    text: str
    method: str = "gptq"
    budget: float | None = None
    budget_kl: float | None = None
    budget_top1: float | None = None
    minimise: str = "size"

    def __post_init__(self) -> None:
        """Refuse what is no choice."""
        if self.method not in METHODS:
            raise EdgelinError(f"--method is {self.method!r}; allowed: {', '.join(METHODS)}")
        if self.minimise not in MINIMISE:
            raise EdgelinError(f"--minimise is {self.minimise!r}; allowed: {', '.join(MINIMISE)}")
        for name, limit in (("--budget", self.budget), ("--budget-kl", self.budget_kl)):
            if limit is not None and not 0 < limit < 10:
                raise EdgelinError(
                    f"{name} is {limit:g}; give a positive number, such as 0.02 for 2 % more bits "
                    f"per byte or 0.02 nat"
                )
        if self.budget_top1 is not None and not 0 <= self.budget_top1 < 1:
            raise EdgelinError(
                f"--budget-top1 is {self.budget_top1:g}; give the least share of first choices "
                f"that stay the same, from 0 to below 1, such as {_TOP1:g}"
            )

    def limits(self, *, auto: bool) -> Budget | None:
        """The budget; ``--quantize auto`` has one in any case."""
        relative, top1 = self.budget, self.budget_top1
        if auto and self.budget_kl is None:
            relative = _RELATIVE if relative is None else relative
            top1 = _TOP1 if top1 is None else top1
        found = Budget(relative, self.budget_kl, top1)
        return None if found == Budget() else found


@dataclass(frozen=True)
class Plan:
    """How a graph will be rounded.

    Args:
        recipe: What every matrix becomes.
        rounded: Matrices that are rounded already, by parameter.
        trade_off: What ``--quantize auto`` chose from.
    """

    recipe: Recipe
    rounded: Mapping[str, Rounded] = field(default_factory=dict)
    trade_off: TradeOff | None = None


class Planner:
    """Makes the plans of one export.

    Args:
        calibration: None: rounding to the nearest code, by roles alone.
        checkpoint: Folder with the tokenizer.
        model: The model in the form that is exported.
        empty: Makes large arrays.
        say: Is told what is being done, a line at a time.
    """

    def __init__(
        self,
        calibration: Calibration | None,
        checkpoint: Path,
        model: SequenceModel,
        *,
        empty: Empty = np.empty,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.calibration, self.model, self.empty, self.say = calibration, model, empty, say
        self.text: Text | None = None
        if calibration is not None:
            self.text = Text(checkpoint, model, calibration.text, empty)

    def plan(self, graph: ir.Model, recipe: Recipe) -> Plan:
        """Decide for one lowered graph.

        Raises:
            EdgelinError: ``--quantize auto`` has no text.
        """
        if self.calibration is None or self.text is None:
            return Plan(recipe)
        recipe = replace(recipe, method=self.calibration.method)
        if budget := self.calibration.limits(auto=recipe.is_auto):
            recipe = replace(recipe, budget_kl=budget.nats(self.text.nats))
        found = matrices(graph)
        if recipe.is_auto:
            return self._auto(found, recipe)
        return Plan(recipe, {} if recipe.method == "nearest" else self._round(found, recipe))

    def loss(self, bundle: Bundle) -> Loss | None:
        """What an opened variant costs on the text; None: there is none."""
        return None if self.text is None else self.text.loss_of_bundle(bundle)

    def budget(self, recipe: Recipe | None) -> Budget | None:
        """Of a variant."""
        if recipe is None or self.calibration is None:
            return None
        return self.calibration.limits(auto=recipe.is_auto)

    def _round(self, found: list[Matrices], recipe: Recipe) -> Mapping[str, Rounded]:
        """Round all matrices by a recipe."""
        assert self.text is not None
        formats = {name: f for own in found if (f := own.format(recipe)) for name in own.names}
        weights = sum(self.model.get_parameter(name).numel() for name in formats)
        self.say(f"rounding {len(formats)} matrices, {recipe.method}")
        with progress_bar("rounding", weights) as done:
            if recipe.method == "gptq":
                return calibrate(
                    self.model, formats, self.text.fitted, progress=done, empty=self.empty
                )
            nearest = {}
            for name, chosen in formats.items():
                nearest[name] = round_parameter(self.model, name, chosen, self.empty)
                done(self.model.get_parameter(name).numel())
            return nearest

    def _auto(self, found: list[Matrices], recipe: Recipe) -> Plan:
        """Choose within the budget."""
        text, calibration = self.text, self.calibration
        assert text is not None and calibration is not None
        budget = calibration.limits(auto=True)
        assert budget is not None
        candidates = {own.name: own for own in found if own.role not in recipe.roles}
        weights = sum(rows * width for own in candidates.values() for rows, width in own.shapes)
        self.say(f"measuring what each of {len(candidates)} matrices costs")
        with progress_bar("measuring each matrix", weights) as done:
            measured = options(
                self.model,
                list(candidates.values()),
                lambda own: _formats(own, recipe),
                text.fitted,
                progress=done,
                empty=self.empty,
            )
        cost = self._cost(candidates)

        def attempt(tried: Recipe) -> tuple[Loss, Mapping[str, Rounded]]:
            rounded = self._round(found, tried)
            loss = text.loss_of_rounded(rounded)
            self.say(
                f"bits per byte {100 * loss.relative:+.2f} %, {loss.kl:.4f} nat from float, "
                f"top-1 the same {100 * loss.top1:.1f} %"
            )
            return loss, rounded

        points = path(measured, cost)
        choice = choose(points, recipe, budget, text.nats, attempt)
        if choice.recipe.bits == FLOAT:
            raise EdgelinError(
                "--quantize auto found no matrix that the budget lets it round; allow more, "
                "or export --quantize none"
            )
        by_size = calibration.minimise == "size"
        rest = self._rest(found, recipe) if by_size else 0.0
        trade_off = TradeOff.of(measured, cost, points, choice, "MB" if by_size else "ms", rest)
        return Plan(choice.recipe, choice.rounded, trade_off)

    def _cost(self, candidates: Mapping[str, Matrices]) -> Callable[[str, Option], float]:
        """What an option of a matrix costs, in MB or ms."""
        assert self.calibration is not None
        if self.calibration.minimise == "size":
            return lambda name, option: option.bytes / 1e6
        timer = Timer()
        return lambda name, option: timer.milliseconds(candidates[name], option.format)

    def _rest(self, found: list[Matrices], recipe: Recipe) -> float:
        """MB of what is not to be chosen."""
        left = self.model.num_parameters()
        fixed = 0
        for own in found:
            left -= sum(rows * width for rows, width in own.shapes)
            if own.role in recipe.roles:
                fixed += size(own, own.format(recipe))
        return (fixed + 4 * left) / 1e6


@contextmanager
def progress_bar(what: str, weights: int) -> Iterator[Callable[[int], None]]:
    """Show how many weights are done; what is given is called with the number of each step."""
    with tqdm(total=weights, unit="weight", unit_scale=True, disable=None, desc=what) as bar:

        def done(count: int) -> None:
            bar.update(count)
            release()

        yield done


def _formats(own: Matrices, recipe: Recipe) -> list[Format]:
    """What matrices may become, without float."""
    widths = [width for _, width in own.shapes]
    tried = [Format(bits, recipe.block(bits, *widths)) for bits in (4, 8)] + [_FINE]
    return [chosen for chosen in dict.fromkeys(tried) if own.fits(chosen)]
