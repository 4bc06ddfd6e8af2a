"""What is in a bundle and whether it is whole: ``edgelin inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgelin.errors import EdgelinError
from edgelin.runtimes.manifest import HASH_LIMIT, FileRecord, Manifest, file_problem
from edgelin.state import StateSpec


def describe(bundle: Path) -> dict[str, Any]:
    """Contract, files and health of a bundle, ready for JSON.

    ``problems`` lists damaged files, an onnxruntime that is too old, and variants that
    ``edgelin run`` would refuse; these are tried only when every file they need is whole.

    Raises:
        EdgelinError: There is no readable manifest.
    """
    manifest = Manifest.read(bundle)
    files = {name: _file(bundle / name, record) for name, record in manifest.files.items()}
    variants: dict[str, dict[str, Any]] = {}
    for name, variant in manifest.variants.items():
        parts = {file: _file(bundle / file, record) for file, record in variant.files.items()}
        variants[name] = {
            "file": variant.file,
            "quantisation": variant.quantisation,
            "bytes": sum(record.bytes for record in variant.files.values()),
            "files": parts,
        }
    checked = {**files, **{f: v for entry in variants.values() for f, v in entry["files"].items()}}
    problems = [f"{name} {entry['problem']}" for name, entry in checked.items() if entry["problem"]]
    whole = not any(entry["problem"] for entry in files.values())
    runtime = _runtime(bundle, manifest, variants if whole else {})
    problems += [runtime["problem"]] if runtime["problem"] else []
    for name, entry in variants.items():
        entry["loads"], failure = runtime["loads"].get(name, (None, None))
        problems += [failure] if failure and failure not in problems else []
    capsules = {name: _capsule(bundle, manifest, name) for name in manifest.capsules}
    problems += [entry["problem"] for entry in capsules.values() if entry["problem"]]
    states = [_state(spec) for spec in manifest.states]
    return {
        "bundle": str(bundle),
        "edgelin_version": manifest.edgelin_version,
        "model_hash": manifest.model_hash,
        "input": manifest.input.as_dict(),
        "output": manifest.output.as_dict(),
        "profile": manifest.profile,
        "opset": manifest.opset,
        "chunk": manifest.chunk,
        "max_time": manifest.max_time,
        "min_onnxruntime": manifest.min_onnxruntime,
        "installed_onnxruntime": runtime["installed"],
        "states": states,
        "state_bytes": sum(state["bytes"] for state in states),
        "state_bytes_per_step": sum(state["bytes_per_step"] for state in states),
        "default_variant": manifest.default_variant,
        "variants": variants,
        "files": files,
        "capsules": capsules,
        "default_capsule": manifest.default_capsule,
        "problems": problems,
    }


def _state(spec: StateSpec) -> dict[str, Any]:
    """A state of the manifest with its size for one stream, at first and by every step."""
    return {**spec.as_dict(), "bytes": spec.num_bytes(), "bytes_per_step": spec.bytes_per_step}


def _capsule(bundle: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """Where a capsule stands, how its states are stored, and why no stream could begin there."""
    from edgelin.runtimes import capsules, state_codec

    capsule = manifest.capsules[name]
    entry = {"file": capsule.file, "bytes": capsule.record.bytes, "sha256": capsule.record.sha256}
    try:
        saved = capsules.read(bundle, manifest, name, variant=None)
    except EdgelinError as error:
        return {**entry, "problem": str(error), "position": None, "states": None, "variant": None}
    used = [dtype for dtype in state_codec.DTYPES if dtype in saved.stored.values()]
    return {
        **entry,
        "problem": None,
        "position": saved.position,
        "states": used[-1] if used else "float32",
        "variant": saved.variant,
    }


def _file(path: Path, record: FileRecord) -> dict[str, Any]:
    """Size of a file, how it was checked, and what is wrong with it."""
    checked = "sha256" if record.bytes <= HASH_LIMIT else "size"
    return {"bytes": record.bytes, "checked": checked, "problem": file_problem(path, record)}


def _runtime(bundle: Path, manifest: Manifest, variants: dict[str, Any]) -> dict[str, Any]:
    """Installed onnxruntime, why it is too old, and whether each whole variant opens."""
    try:
        import onnxruntime

        from edgelin.runtimes.session import Bundle, version_problem
    except ImportError as error:
        problem = f"onnxruntime is not installed ({error}): pip install onnxruntime"
        return {"installed": None, "problem": problem, "loads": {}}
    loads: dict[str, tuple[bool, str | None]] = {}
    too_old = version_problem(manifest)
    for name, entry in variants.items():
        if too_old or any(part["problem"] for part in entry["files"].values()):
            continue
        try:
            # All that a run checks: the contract in the graph, a call of it, the tokenizer.
            opened = Bundle(bundle, variant=name, threads=1)
            _ = opened.text if manifest.tokenizer is not None else None
            loads[name] = (True, None)
        except EdgelinError as error:
            loads[name] = (False, str(error))
    return {
        "installed": onnxruntime.__version__,
        "problem": f"the bundle {too_old}" if too_old else None,
        "loads": loads,
    }
