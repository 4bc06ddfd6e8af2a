"""The output folder of a run: what may be written into it, and what stands there."""

from __future__ import annotations

from pathlib import Path

from edgelin import checkpoint
from edgelin.errors import EdgelinError
from edgelin.model import SequenceModel
from edgelin.train import snapshot

# what makes a folder a checkpoint or a bundle, weights of other projects included
_MODELS = ("config.json", "edgelin.json", "model*.safetensors*", "pytorch_model*.bin")


def check(out: Path, *, resume: bool) -> None:
    """Refuse a folder that a run would overwrite, or that holds none to resume.

    Raises:
        EdgelinError: A run stands there already, or a model that no run can go on with; when
            resuming, there is no run.
    """
    if resume:
        if not snapshot.exists(out):
            raise EdgelinError(f"{out} holds no run to resume; start it without --resume")
        return
    if snapshot.exists(out):
        raise EdgelinError(f"{out} holds a run already; add --resume, or choose another --out")
    found = sorted(path.name for pattern in _MODELS for path in out.glob(pattern))
    if found:
        raise EdgelinError(
            f"{out} holds a model without training state ({found[0]}), which training would "
            f"overwrite; choose another --out"
        )


def keep(out: Path, model: SequenceModel, tokenizer_json: str | None) -> None:
    """Write the checkpoint; if that fails, files that are new go, since they are no checkpoint."""
    before = set(out.iterdir())
    try:
        checkpoint.save(out, model, tokenizer_json)
    except BaseException:
        for path in set(out.iterdir()) - before:
            path.unlink(missing_ok=True)
        raise


def saved(out: Path) -> str:
    """What a run that fails leaves in its folder, in words."""
    step = snapshot.latest_step(out)
    if step is not None:
        return f"the state of step {step} is kept, go on from it with --resume"
    if (out / "config.json").is_file():
        return "the checkpoint that scored best is kept, but no state to resume from"
    return "nothing was saved"
