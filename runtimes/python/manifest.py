"""The manifest ``edgelin.json``: what a runner needs to know about a bundle.

``runtimes/README.md`` describes the file for runners in other languages. The exporter builds a
:class:`Manifest` and calls :meth:`Manifest.write`; a runtime calls :meth:`Manifest.read`, which
refuses a file that was changed after export. Needs neither torch nor onnx nor onnxruntime.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from edgelin import __version__
from edgelin.errors import EdgelinError
from edgelin.files import replacing, sha256
from edgelin.runtimes.canonical_json import digest
from edgelin.runtimes.manifest_types import check_types
from edgelin.runtimes.signature import Features, Input, Output, read_signature
from edgelin.runtimes.tokenizer_record import TokenizerRecord
from edgelin.state import StateSpec

FORMAT = 1
FILE_NAME = "edgelin.json"
METADATA_KEY = "edgelin"
PROFILES = ("fused", "plain", "onnx")
# Hashing more than this at every start would cost seconds; larger files are compared by size.
HASH_LIMIT = 256 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """Hash and size of one file of the bundle."""

    sha256: str
    bytes: int

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Measure a file on disk."""
        return cls(sha256(path), path.stat().st_size)


@dataclass(frozen=True)
class Variant:
    """One graph of the bundle and the files it is made of.

    Args:
        file: The ``.onnx`` file, relative to the bundle.
        files: Every file of the variant (graph and external data) by relative path.
        quantisation: ``{"bits", "block_size", "accuracy_level", "float"}``, or None for float32.
    """

    file: str
    files: dict[str, FileRecord]
    quantisation: dict[str, Any] | None = None


@dataclass(frozen=True)
class Capsule:
    """A state file in the bundle (see :mod:`edgelin.runtimes.capsules`).

    Args:
        file: Its path, relative to the bundle.
        record: Its hash and size.
    """

    file: str
    record: FileRecord


@dataclass(frozen=True)
class Manifest:
    """Content of ``edgelin.json``.

    Args:
        model_hash: sha256 of the checkpoint; the same for all variants of one model.
        input: What the graphs read.
        output: What they answer.
        states: State tensors in graph order.
        tokenizer: Tokenizer file and special ids; None for a model of features.
        profile: ``"fused"``, ``"plain"`` or ``"onnx"``.
        opset: ai.onnx opset of the graphs.
        min_onnxruntime: Oldest onnxruntime that runs the graphs, such as ``"1.25.1"``.
        default_variant: Key of ``variants`` that is used unless another is asked for.
        variants: Name to graph.
        files: Other files of the bundle by relative path.
        capsules: Name to a state that streams can begin in.
        default_capsule: The one in which they begin unless told; None: before the first step.
        max_time: Largest number of steps in one call, None for no limit.
        chunk: Number of steps a call should carry while reading many.
        num_logits_to_keep: Overridable initializer: how many last positions are answered, 0 for
            all.
        lengths: Input that says how many steps of a call each row has; None: all rows are full.
        edgelin_version: Version of the exporter.
    """

    model_hash: str
    input: Input
    output: Output
    states: list[StateSpec]
    tokenizer: TokenizerRecord | None
    profile: str
    opset: int
    min_onnxruntime: str
    default_variant: str
    variants: dict[str, Variant]
    files: dict[str, FileRecord] = field(default_factory=dict)
    capsules: dict[str, Capsule] = field(default_factory=dict)
    default_capsule: str | None = None
    max_time: int | None = None
    chunk: int = 64
    num_logits_to_keep: str = "num_logits_to_keep"
    lengths: str | None = None
    edgelin_version: str = __version__

    def io_part(self) -> dict[str, Any]:
        """What the graphs themselves carry as JSON in ``metadata_props["edgelin"]``."""
        return {
            "format": FORMAT,
            "input": self.input.as_dict(),
            "output": self.output.as_dict(),
            "num_logits_to_keep": self.num_logits_to_keep,
            **({} if self.lengths is None else {"lengths": self.lengths}),
            "max_time": self.max_time,
            "states": [spec.as_dict() for spec in self.states],
            "profile": self.profile,
        }

    def as_dict(self) -> dict[str, Any]:
        """The whole file, digest included."""
        io = self.io_part()
        content = {
            "format": io.pop("format"),
            "edgelin_version": self.edgelin_version,
            "model_hash": self.model_hash,
            **io,
            "chunk": self.chunk,
            "tokenizer": None if self.tokenizer is None else self.tokenizer.as_dict(),
            "opset": self.opset,
            "min_onnxruntime": self.min_onnxruntime,
            "default_variant": self.default_variant,
            "variants": {
                name: {
                    "file": variant.file,
                    "quantisation": variant.quantisation,
                    "files": _records(variant.files),
                }
                for name, variant in self.variants.items()
            },
            "files": _records(self.files),
            "capsules": {
                name: {"file": capsule.file, **vars(capsule.record)}
                for name, capsule in self.capsules.items()
            },
            "default_capsule": self.default_capsule,
        }
        content["digest"] = digest(content)
        return content

    @classmethod
    def from_dict(cls, content: dict[str, Any], where: str = FILE_NAME) -> Manifest:
        """Read the parsed JSON.

        Raises:
            EdgelinError: The digest differs, a key is missing, or a value makes no sense.
        """
        if content.get("format") != FORMAT:
            raise EdgelinError(
                f"{where} has format {content.get('format')!r}; this edgelin {__version__} reads "
                f"format {FORMAT}: export again, or install the edgelin that wrote it"
            )
        try:
            found = digest(content)
        except (RecursionError, ValueError) as error:
            raise EdgelinError(
                f"{where} is not a valid manifest: {type(error).__name__}; export again"
            ) from error
        if content.get("digest") != found:
            raise EdgelinError(
                f"{where} was changed after export: its digest differs; "
                "take the original file, or export the bundle again"
            )
        try:
            check_types(content)
            manifest = _parse(cls, content)
        except KeyError as error:
            raise EdgelinError(
                f"{where} is not a valid manifest: KeyError {error}; export again"
            ) from error
        except ValueError as error:
            raise EdgelinError(f"{where}: {error}; export again") from error
        _validate(manifest, where)
        return manifest

    @classmethod
    def read(cls, bundle: Path | str) -> Manifest:
        """Read ``edgelin.json`` of a bundle folder.

        Raises:
            EdgelinError: There is no bundle, or its manifest is damaged.
        """
        path = Path(bundle) / FILE_NAME
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            hint = "" if Path(bundle).is_dir() else " (no such folder)"
            raise EdgelinError(
                f"{bundle} is no bundle: it has no {FILE_NAME}{hint}; "
                "give a folder written by `edgelin export`"
            ) from None
        except OSError as error:
            raise EdgelinError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            raise EdgelinError(
                f"{path} is not valid JSON ({reason}); take the original, or export again"
            ) from error
        if not isinstance(content, dict):
            raise EdgelinError(f"{path} is not a JSON object; export the bundle again")
        return cls.from_dict(content, str(path))

    def write(self, bundle: Path | str) -> Path:
        """Write ``edgelin.json`` with its digest into a bundle folder, atomically."""
        _validate(self, FILE_NAME)
        path = Path(bundle) / FILE_NAME
        text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
        return path

    def variant(self, name: str | None = None) -> Variant:
        """A variant by name; None is the default one.

        Raises:
            EdgelinError: The bundle has no such variant.
        """
        wanted = name or self.default_variant
        if wanted not in self.variants:
            have = ", ".join(sorted(self.variants))
            raise EdgelinError(f"the bundle has no variant {wanted!r}; it has: {have}")
        return self.variants[wanted]

    def check_files(
        self, bundle: Path | str, variant: str | None = None, *, limit: int = HASH_LIMIT
    ) -> None:
        """Compare the common files and those of one variant with their records.

        Args:
            bundle: The folder.
            variant: Its name; None: the default one.
            limit: Files up to so many bytes are hashed, larger ones are compared by size.

        Raises:
            EdgelinError: A file is missing or differs.
        """
        records = {**self.files, **self.variant(variant).files}
        for name, record in records.items():
            problem = file_problem(Path(bundle) / name, record, limit)
            if problem:
                raise EdgelinError(
                    f"{Path(bundle) / name} {problem}; take the original, or export again"
                )


def file_problem(path: Path, record: FileRecord, limit: int = HASH_LIMIT) -> str | None:
    """What is wrong with a file, in a few words, or None when it is as recorded."""
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"has {size} bytes where the manifest says {record.bytes}"
        if size <= limit and sha256(path) != record.sha256:
            return "differs from its sha256 in the manifest"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def file_records(bundle: Path | str, names: Iterable[str]) -> dict[str, FileRecord]:
    """Measure files of a bundle: relative path (with ``/``) to record."""
    return {name: FileRecord.of(Path(bundle) / name) for name in names}


def _records(files: Mapping[str, FileRecord]) -> dict[str, dict[str, Any]]:
    """JSON form of file records."""
    return {name: {"sha256": r.sha256, "bytes": r.bytes} for name, r in files.items()}


def _read_records(content: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Inverse of :func:`_records`."""
    return {name: FileRecord(r["sha256"], r["bytes"]) for name, r in content.items()}


def _parse(cls: type[Manifest], content: Mapping[str, Any]) -> Manifest:
    """Pick the fields out of parsed JSON that has passed ``check_types``."""
    source, output = read_signature(content)
    tokenizer = content["tokenizer"]
    return cls(
        model_hash=content["model_hash"],
        input=source,
        output=output,
        states=[StateSpec.from_dict(entry) for entry in content["states"]],
        tokenizer=None if tokenizer is None else TokenizerRecord.from_dict(tokenizer),
        profile=content["profile"],
        opset=content["opset"],
        min_onnxruntime=content["min_onnxruntime"],
        default_variant=content["default_variant"],
        variants={
            name: Variant(entry["file"], _read_records(entry["files"]), entry["quantisation"])
            for name, entry in content["variants"].items()
        },
        files=_read_records(content["files"]),
        capsules={
            name: Capsule(entry["file"], FileRecord(entry["sha256"], entry["bytes"]))
            for name, entry in content.get("capsules", {}).items()
        },
        default_capsule=content.get("default_capsule"),
        max_time=content["max_time"],
        chunk=content["chunk"],
        num_logits_to_keep=content["num_logits_to_keep"],
        lengths=content.get("lengths"),
        edgelin_version=content["edgelin_version"],
    )


def _validate(manifest: Manifest, where: str) -> None:
    """Refuse values that no runner could follow."""
    if manifest.profile not in PROFILES:
        _refuse(where, f"profile is {manifest.profile!r}; allowed: {', '.join(PROFILES)}")
    if manifest.default_variant not in manifest.variants:
        _refuse(where, f"default_variant {manifest.default_variant!r} is not among variants")
    if manifest.default_capsule not in (None, *manifest.capsules):
        _refuse(where, f"default_capsule {manifest.default_capsule!r} is not among capsules")
    limit = manifest.max_time
    if manifest.chunk < 1 or (limit is not None and not manifest.chunk <= limit):
        _refuse(where, f"chunk is {manifest.chunk}; 1 .. max_time ({limit}) is allowed")
    names = [spec.name for spec in manifest.states]
    if len(set(names)) != len(names):
        _refuse(where, "two states have the same name")
    for spec in manifest.states:
        if spec.dtype not in ("float32", "int64"):
            _refuse(where, f"state {spec.name} is {spec.dtype}; allowed: float32, int64")
        if spec.growing_axis is not None and spec.dtype != "float32":
            _refuse(where, f"state {spec.name} grows and is {spec.dtype}; allowed: float32")
    if isinstance(manifest.input, Features) != (manifest.tokenizer is None):
        _refuse(where, f"tokenizer does not fit an input of {manifest.input.kind}")
    paths = [*manifest.files, *(capsule.file for capsule in manifest.capsules.values())]
    for name, variant in manifest.variants.items():
        if variant.file not in variant.files:
            _refuse(where, f"variant {name} does not list its own file {variant.file!r}")
        paths += variant.files
    for path in paths:
        inside = not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts
        if not inside or "\\" in path or PureWindowsPath(path).drive:
            _refuse(where, f"file {path!r} lies outside the bundle")
    if manifest.tokenizer is not None:
        _validate_tokenizer(manifest, manifest.tokenizer, where)


def _validate_tokenizer(manifest: Manifest, tokenizer: TokenizerRecord, where: str) -> None:
    """Refuse ids that the model does not know, and a file that is not in the bundle."""
    largest = tokenizer.largest_id
    if largest >= manifest.output.size:
        _refuse(where, f"special token {largest} is beyond vocab_size {manifest.output.size}")
    for file in tokenizer.files:
        if file not in manifest.files:
            _refuse(where, f"tokenizer: {file!r} is not among files")


def _refuse(where: str, problem: str) -> None:
    """Raise the one-line error of a manifest that contradicts itself."""
    raise EdgelinError(f"{where}: {problem}; export the bundle again")
