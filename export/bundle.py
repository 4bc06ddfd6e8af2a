"""Export a checkpoint: trace, lower, quantise, write, run, compare, and only then put in place.

Everything is written into a temporary folder beside the target and renamed at the end, so that a
target is either complete and checked, or untouched.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from edgelin import checkpoint as checkpoints
from edgelin.errors import EdgelinError
from edgelin.experts import Experts
from edgelin.export import attention as attentions
from edgelin.export import contract, genai, golden, notices, passes, store, target
from edgelin.export.attention import Attention, Cost
from edgelin.export.golden import Errors
from edgelin.export.measure import measure
from edgelin.export.passes.portable import NO_EXPERTS, make_portable
from edgelin.export.profiles import Profile, check_onnxruntime, find
from edgelin.export.quantise.auto import TradeOff
from edgelin.export.quantise.nodes import Outcome
from edgelin.export.quantise.nodes import quantise as quantise_graph
from edgelin.export.quantise.plan import Calibration, Planner, progress_bar
from edgelin.export.quantise.recipe import VARIANTS, Recipe, find_recipes
from edgelin.export.quantise.rounding import Rounded
from edgelin.export.reference import reference
from edgelin.export.report import (
    JSON_NAME,
    PLOT_NAME,
    TEXT_NAME,
    Report,
    VariantReport,
    count_nodes,
    is_near,
)
from edgelin.export.step_form import step_form
from edgelin.export.target import COPIED
from edgelin.export.trace import trace
from edgelin.export.verify.streams import ragged_error
from edgelin.families import convert
from edgelin.files import staging
from edgelin.mapped import MappedFile, release
from edgelin.model import SequenceModel
from edgelin.runtimes.manifest import FileRecord, Manifest, Variant, file_records
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.text import TextCodec


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    quantise: tuple[str, ...] = ("none",),
    profile: str = "fused",
    force: bool = False,
    attention: str = "full",
    text: str | None = None,
    streams: bool = False,
    roles: tuple[str, ...] = (),
    calibration: Calibration | None = None,
) -> Report:
    """Write a bundle.

    Args:
        checkpoint: Checkpoint folder, ours or one that a family reads.
        out: Folder to make; it must not exist, unless ``force``.
        quantise: Which variants, names of ``VARIANTS``.
        profile: ``"fused"``, ``"plain"`` or ``"onnx"``.
        force: Replace a bundle or empty folder at ``out``, after the new bundle has passed.
        attention: What layers that attend to all tokens become: ``"full"``, ``"window=N"`` or
            ``"window=N,sinks=M"``.
        text: Measure on it what a window costs.
        streams: Whether the graphs take rows of different lengths in one call.
        roles: Bits of tensors in all quantised variants, such as ``"head=int8"``.
        calibration: A text for rounding and its limits; None: to the nearest codes.

    Returns:
        What was measured.

    Raises:
        EdgelinError: The input is bad, the disk is full, or the bundle missed a gate; then it is
            kept as ``<out>.failed``.
    """
    recipes = find_recipes(quantise, roles, calibrated=calibration is not None)
    chosen = find(profile)
    check_onnxruntime(chosen.min_onnxruntime(quantised=any(recipes.values())))
    choice = attentions.parse(attention)
    if text is not None and not choice.window:
        raise EdgelinError(
            "a text measures what a window of attention costs; give --attention window=N with "
            "--text, or measure the bundle with `edgelin eval`"
        )
    out = target.find(Path(checkpoint), Path(out), force=force)
    if lost := target.capsules(out):
        _say(f"{out} is replaced with its capsules ({', '.join(lost)}): make them again")
    _say(f"reading {checkpoint}")
    with convert.own(Path(checkpoint)) as own, attentions.applied(own, choice) as used:
        cost = None
        if text is not None:
            _say(f"measuring {choice} on the text")
            cost = attentions.cost(own, used, choice, text)
        options: dict[str, Any] = {"force": force, "streams": streams}
        options |= {"roles": roles, "calibration": calibration}
        return _export(used, out, recipes, chosen, (choice, cost), **options)


def _export(
    checkpoint: Path,
    out: Path,
    recipes: dict[str, Recipe | None],
    chosen: Profile,
    attention: tuple[Attention, Cost | None],
    *,
    force: bool,
    streams: bool,
    roles: tuple[str, ...],
    calibration: Calibration | None,
) -> Report:
    """:func:`export_checkpoint` of a checkpoint of ours."""
    with staging(out) as folder, MappedFile(out.parent) as mapped:
        model, recipes = _load(checkpoint, recipes, roles, chosen, mapped)
        planner = Planner(calibration, checkpoint, model, empty=mapped.empty, say=_say)
        job = _Export(checkpoint, model, chosen, folder, mapped, attention, streams, planner)
        report = job.run(recipes)
        failures = report.failures()
        report.bundle = target.failed(out) if failures else out
        target.put(folder, report.bundle, force=force or bool(failures))
    if failures:
        raise EdgelinError(f"{'; '.join(failures)}; see {report.bundle / TEXT_NAME}")
    return report


def _load(
    checkpoint: Path,
    recipes: dict[str, Recipe | None],
    roles: tuple[str, ...],
    chosen: Profile,
    mapped: MappedFile,
) -> tuple[SequenceModel, dict[str, Recipe | None]]:
    """The model in the form that is exported, with everything checked, and the recipes for it."""
    model, config = checkpoints.load(checkpoint, mapped=mapped)
    mixers_only = not any(hasattr(block, "mlp") for block in model.blocks)
    recipes = {
        name: recipe and recipe.for_model(config, roles, mixers_only=mixers_only)
        for name, recipe in recipes.items()
    }
    if "portable" in recipes and _has_experts(model):
        raise EdgelinError(NO_EXPERTS)
    check_onnxruntime(_oldest(chosen, model, recipes))
    _check_weights(checkpoint, model)
    if config.features is None:
        _check_tokenizer(checkpoint / "tokenizer.json", config.vocab_size)
    return step_form(model), recipes


@dataclass(frozen=True)
class _Built:
    """One written graph."""

    variant: Variant
    recipe: Recipe | None
    nodes: dict[str, int]
    outcome: Outcome
    trade_off: TradeOff | None


@dataclass(frozen=True)
class _Export:
    """One export under way: what its steps need."""

    checkpoint: Path
    model: SequenceModel
    profile: Profile
    folder: Path
    mapped: MappedFile
    attention: tuple[Attention, Cost | None]
    streams: bool
    planner: Planner

    def run(self, recipes: dict[str, Recipe | None]) -> Report:
        """Write and check every variant, then the common files."""
        for name in COPIED:
            if (self.checkpoint / name).is_file():
                shutil.copyfile(self.checkpoint / name, self.folder / name)
        manifest = contract.manifest(
            self.checkpoint,
            self.model,
            profile=self.profile,
            min_onnxruntime=_oldest(self.profile, self.model, recipes),
            default_variant=next(file for name, file in VARIANTS.items() if name in recipes),
            lengths=self.streams,
        )
        for line in notices.template(self.folder, manifest.tokenizer):
            _say(line)
        built = self._build_all(recipes, manifest)
        variants = {key: one.variant for key, one in built.items()}
        genai.write(self.folder, dataclasses.replace(manifest, variants=variants))
        manifest = dataclasses.replace(manifest, variants=variants, files=self._common())
        manifest.write(self.folder)
        report = self._check(built)
        report.write(self.folder)
        dataclasses.replace(manifest, files=self._common()).write(self.folder)
        return report

    def _build_all(
        self, recipes: dict[str, Recipe | None], manifest: Manifest
    ) -> dict[str, _Built]:
        """Trace once and make every variant; the trace's weights are gone afterwards."""
        _say(f"tracing {len(self.model.config.layers)} layers")
        traced = trace(self.model, lengths=self.streams)
        gc.collect()  # torch's own graphs, which refer to themselves
        _give_back()
        try:
            return {
                VARIANTS[name]: self._build(traced.clone(), VARIANTS[name], recipe, manifest)
                for name, recipe in recipes.items()
            }
        finally:
            _forget_weights(traced)

    def _build(
        self, graph: ir.Model, key: str, recipe: Recipe | None, manifest: Manifest
    ) -> _Built:
        """Lower, quantise and write one variant."""
        passes.lower(graph, self.profile)
        outcome, trade_off = Outcome(), None
        if recipe is not None:
            plan = self.planner.plan(graph, recipe)
            recipe, trade_off = plan.recipe, plan.trade_off
            with progress_bar(f"rounding {key}", self.model.num_parameters()) as done:
                outcome = quantise_graph(
                    graph, recipe, rounded=plan.rounded, progress=done, empty=self.mapped.empty
                )
            for line in notices.float_experts(key, self.model, outcome.matrices):
                _say(line)
        passes.finish(graph, self.profile)
        portable = key == VARIANTS["portable"] and make_portable(graph)
        contract.stamp(graph, manifest)
        _say(f"writing {key}")
        path = self.folder / "onnx" / f"{key}.onnx"
        path.parent.mkdir(exist_ok=True)
        written = [str(p.relative_to(self.folder).as_posix()) for p in store.save(graph, path)]
        _forget_weights(graph)
        operator = {"operator": "DequantizeLinear" if portable else "MatMulNBits"}
        record = None if recipe is None else {**recipe.as_dict(min(outcome.bits, 8)), **operator}
        return _Built(
            Variant(written[0], file_records(self.folder, written), record),
            recipe,
            count_nodes([node.op_type for node in graph.graph]),
            outcome,
            trade_off,
        )

    def _check(self, built: dict[str, _Built]) -> Report:
        """Run the golden stream through every variant and write ``golden.json``."""
        _say("running the golden stream")
        specs, parameters = self.model.state_specs(), self.model.num_parameters()
        wanted = self._reference()
        exact = {key: self._own_weights(one, wanted) for key, one in built.items()}
        reports = {key: self._replay(key, one, wanted, *exact[key]) for key, one in built.items()}
        golden.write(self.folder, wanted, {key: found.model for key, found in reports.items()})
        return Report(
            bundle=self.folder,
            profile=self.profile.name,
            layers=len(self.model.config.layers),
            unit=contract.signature(self.model.config)[0].unit,
            parameters=parameters,
            state_bytes=sum(spec.num_bytes() for spec in specs),
            state_bytes_per_step=sum(spec.bytes_per_step for spec in specs),
            variants=reports,
            attention=self.attention[0],
            attention_cost=self.attention[1],
        )

    def _own_weights(
        self, one: _Built, wanted: golden.Stream
    ) -> tuple[golden.Stream, Errors | None]:
        """The golden stream in float64 with a graph's weights, and what rounded activations do."""
        rounded = one.outcome.rounded
        if not rounded:
            return wanted, None
        exact = self._reference(rounded)
        noisy = self._reference(rounded, rounded_activations=True)
        return exact, golden.compare(exact, noisy)

    def _reference(
        self, rounded: Mapping[str, Rounded] | None = None, **options: Any
    ) -> golden.Stream:
        """The golden stream in torch."""
        stream = reference(self.model, rounded, empty=self.mapped.empty, **options)
        _give_back()
        return stream

    def _replay(
        self,
        key: str,
        one: _Built,
        wanted: golden.Stream,
        exact: golden.Stream,
        rounded_activations: Errors | None,
    ) -> VariantReport:
        """Run the golden stream through one variant."""
        gc.collect()  # models in other precisions, which refer to themselves
        _give_back()
        opened = Bundle(self.folder, variant=key)
        got = golden.replay(opened, wanted.inputs, self.mapped.empty)
        ragged = ragged_error(opened, wanted.inputs)
        loss = self.planner.loss(opened) if one.recipe is not None else None
        del opened  # before there is another session
        floats = None
        if rounded_activations is not None:
            _give_back()
            own = golden.replay_float(self.folder, one.variant, wanted.inputs)
            floats = golden.compare(exact, own)
        _give_back()
        graph, float32 = golden.compare(exact, got), None
        if not is_near(floats or graph):
            plain = self._reference(one.outcome.rounded, dtype=torch.float32)
            float32 = golden.compare(exact, plain)
        return VariantReport(
            bits=one.outcome.bits,
            bytes=sum(record.bytes for record in one.variant.files.values()),
            nodes=one.nodes,
            graph=graph,
            model=golden.compare(wanted, got),
            float_activations=floats,
            rounded_activations=rounded_activations,
            float32=float32,
            matrices=one.outcome.matrices,
            ragged=ragged,
            loss=loss,
            budget=self.planner.budget(one.recipe),
            trade_off=one.trade_off,
            measured=measure(self.folder, key),
        )

    def _common(self) -> dict[str, FileRecord]:
        """Records of the files that no variant owns, as far as they are written."""
        names = [*COPIED, genai.FILE_NAME, golden.FILE_NAME, JSON_NAME, TEXT_NAME, PLOT_NAME]
        return file_records(self.folder, [n for n in names if (self.folder / n).is_file()])


def _oldest(profile: Profile, model: SequenceModel, recipes: dict[str, Recipe | None]) -> str:
    """The oldest onnxruntime for a model's graphs."""
    quantised = any(recipes.values())
    return profile.min_onnxruntime(quantised=quantised, experts=_has_experts(model))


def _has_experts(model: SequenceModel) -> bool:
    """Whether a model has layers of experts."""
    return any(isinstance(module, Experts) for module in model.modules())


def _check_weights(checkpoint: Path, model: SequenceModel) -> None:
    """Refuse weights with which every answer would be NaN, or that cannot be rounded."""
    for name, tensor in checkpoints.own_tensors(model).items():
        bounds = (bound for part in tensor.flatten().split(1 << 24) for bound in part.aminmax())
        if not all(bound.isfinite() for bound in bounds):
            raise EdgelinError(
                f"{checkpoint}: {name} holds NaN or infinity; take an earlier checkpoint, or "
                f"train it again with a smaller learning rate"
            )
        release()


def _forget_weights(graph: ir.Model) -> None:
    """Free a graph's weights though it lives on: onnxscript's rules keep the last that they saw."""
    for value in graph.graph.initializers.values():
        value.const_value = None


def _give_back() -> None:
    """Give memory back to the system: mapped pages, and what glibc keeps of freed memory."""
    release()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    """Refuse a tokenizer that no runtime could open."""
    if path.is_file():  # its absence is the contract's to tell
        TextCodec(path, vocab_size)


def _say(text: str) -> None:
    """Tell progress."""
    print(f"edgelin export: {text}", file=sys.stderr, flush=True)
