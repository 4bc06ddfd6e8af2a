"""Graph transforms, one a file: each a function ``(model) -> changed``, in place.

``lower`` runs those of a profile in order, from the traced graph to one that onnxruntime runs.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from edgelin.export.passes.default_lengths import default_lengths
from edgelin.export.passes.edit import drop_unused
from edgelin.export.passes.experts import lower_experts
from edgelin.export.passes.fold import fold
from edgelin.export.passes.hoist_reshapes import hoist_reshapes
from edgelin.export.passes.lower_recurrences import lower_recurrences
from edgelin.export.passes.norms import decompose_norms, fuse_norms
from edgelin.export.passes.opset import set_opset
from edgelin.export.passes.reshapes import clean_reshapes
from edgelin.export.passes.select_logits import select_logits
from edgelin.export.passes.shared_keys import share_keys
from edgelin.export.passes.silu import expand_silu, fuse_silu
from edgelin.export.passes.softplus import simplify_softplus
from edgelin.export.passes.splits import merge_splits
from edgelin.export.passes.stacks import cancel_stacks
from edgelin.export.passes.tied_head import fuse_tied_head, plain_tied_head
from edgelin.export.profiles import Profile


def lower(model: ir.Model, profile: Profile) -> None:
    """Turn a traced graph into one of the profile; tied head and experts stay opaque."""
    default_lengths(model)
    clean_reshapes(model)
    simplify_softplus(model)
    select_logits(model)
    lower_recurrences(model, profile.form)
    cancel_stacks(model)
    fold(model)
    fuse_silu(model)
    clean_reshapes(model)
    CommonSubexpressionEliminationPass()(model)
    hoist_reshapes(model)
    clean_reshapes(model)
    if profile.vendor_ops:
        share_keys(model)
        clean_reshapes(model)
        merge_splits(model)
        fuse_norms(model)
    else:
        expand_silu(model)
        if profile.opset < 23:
            decompose_norms(model)
    model.graph.sort()


def finish(model: ir.Model, profile: Profile) -> None:
    """Lower what quantisation left, and stamp the opset."""
    lower_experts(model, fused=profile.vendor_ops)
    (fuse_tied_head if profile.vendor_ops else plain_tied_head)(model)
    drop_unused(model)
    set_opset(model, profile)


__all__ = ["finish", "lower"]
