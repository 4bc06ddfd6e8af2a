"""What foreign checkpoints are read, and how their layers run: found in the source, not imported.

The families need torch, which a machine that only runs bundles has not. So this reads their files:
the docstring, ``MODEL_TYPES``, and the mixers that they name (``"type": "mamba2"``), also through
functions of other files; of a mixer, the states of its ``StateSpec`` calls and the
recurrences that it imports; of a recurrence, whether its ``onnx.py`` has a fused form.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parent
_FAMILIES, _MIXERS, _RECURRENCES = "families", "mixers", "recurrences"


@dataclass(frozen=True)
class Family:
    """One file of :mod:`edgelin.families`.

    Args:
        name: Of the file.
        about: Its docstring, a paragraph an entry.
        model_types: What ``model_type`` of ``config.json`` may be.
        mixers: What its layers are made of.
    """

    name: str
    about: tuple[str, ...]
    model_types: tuple[str, ...]
    mixers: tuple[str, ...]


@dataclass(frozen=True)
class Mixer:
    """One file of :mod:`edgelin.mixers`.

    Args:
        name: Of the file.
        states: Kind and layout of every state that it may have.
        fused: Recurrences that one operator computes in the fused profile.
        plain: Recurrences that are written with standard operators in every profile.
    """

    name: str
    states: tuple[tuple[str, str], ...]
    fused: tuple[str, ...]
    plain: tuple[str, ...]


def families() -> list[Family]:
    """Every family, by name."""
    found = []
    for path in sorted((_ROOT / _FAMILIES).glob("*.py")):
        source = _Source.of(_FAMILIES, path.stem)
        if "MODEL_TYPES" not in source.defined:
            continue
        nodes = list(_reachable(source, [*source.defined]))
        names = {mixer.stem for mixer in (_ROOT / _MIXERS).glob("[a-z]*.py")}
        found.append(
            Family(
                path.stem,
                tuple((ast.get_docstring(source.tree) or "").split("\n\n")),
                _model_types(source),
                tuple(sorted({word for word in _types(nodes) if word in names})),
            )
        )
    return found


def mixer(name: str) -> Mixer:
    """A mixer by name."""
    trees = [source.tree for source in _with_bases(name)]
    used = sorted({recurrence for tree in trees for recurrence in _recurrences(tree)})
    states = {kind: layout for tree in trees for kind, layout in _states(tree)}
    return Mixer(
        name,
        tuple(states.items()),
        tuple(r for r in used if _has_fused(r)),
        tuple(r for r in used if not _has_fused(r)),
    )


@dataclass(frozen=True, eq=False)
class _Source:
    """A parsed file: what its top level defines, and what it imports from its own folder."""

    folder: str
    tree: ast.Module
    defined: dict[str, ast.AST]
    imported: dict[str, tuple[str, str]]  # name here to file and name there ("": the file)

    @classmethod
    @cache
    def of(cls, folder: str, name: str) -> _Source:
        """Parse ``edgelin/<folder>/<name>.py``."""
        tree = ast.parse((_ROOT / folder / f"{name}.py").read_text(encoding="utf-8"))
        defined: dict[str, ast.AST] = {}
        imported = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined[node.name] = node
            elif isinstance(node, ast.Assign):
                defined |= {t.id: node.value for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined[node.target.id] = node.value or node
            elif isinstance(node, ast.ImportFrom):
                package, _, file = (node.module or "").removeprefix("edgelin.").partition(".")
                for alias in node.names if package == folder else ():
                    there = (file, alias.name) if file else (alias.name, "")
                    if (_ROOT / folder / f"{there[0]}.py").is_file():
                        imported[alias.asname or alias.name] = there
        return cls(folder, tree, defined, imported)


def _reachable(source: _Source, names: list[str]) -> Iterator[ast.AST]:
    """Definitions, and those that they use, in this file and in others of its folder."""
    todo, seen = [(source, name) for name in names], set()
    while todo:
        here, name = todo.pop()
        if (here, name) in seen:
            continue
        seen.add((here, name))
        if name in here.imported:
            file, there = here.imported[name]
            todo += [(_Source.of(here.folder, file), there)] if there else []
            continue
        node = here.defined.get(name)
        if node is None:
            continue
        yield node
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                todo.append((here, inner.id))
            elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                file, there = here.imported.get(inner.value.id, ("", "x"))
                if not there:
                    todo.append((_Source.of(here.folder, file), inner.attr))


def _types(nodes: list[ast.AST]) -> Iterator[str]:
    """The values of all keys "type"."""
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Dict):
                for key, value in zip(inner.keys, inner.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "type":
                        yield from (
                            str(word.value)
                            for word in ast.walk(value)
                            if isinstance(word, ast.Constant)
                        )


def _model_types(source: _Source) -> tuple[str, ...]:
    """``MODEL_TYPES``: a tuple of texts, or of the keys of a table."""
    node = source.defined["MODEL_TYPES"]
    if isinstance(node, ast.Tuple):
        return tuple(_text(item) for item in node.elts)
    table = next(n for n in _reachable(source, ["MODEL_TYPES"]) if isinstance(n, ast.Dict))
    return tuple(sorted(str(key.value) for key in table.keys if isinstance(key, ast.Constant)))


def _with_bases(name: str) -> Iterator[_Source]:
    """A mixer's file and those of the mixers that it is made from, those first."""
    source = _Source.of(_MIXERS, name)
    for file, _ in dict.fromkeys(source.imported.values()):
        if file != "__init__":
            yield from _with_bases(file)
    yield source


def _states(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Kind and layout of every ``StateSpec``."""
    kinds = {
        generator.target.id: [_text(c) for c in ast.walk(generator.iter) if _text(c)]
        for generator in ast.walk(tree)
        if isinstance(generator, ast.comprehension) and isinstance(generator.target, ast.Name)
    }
    texts = {
        target.id: _text(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Attribute) and call.func.attr == "matrix_spec":
            yield "recurrent", "batch heads key value"
        if isinstance(call.func, ast.Name) and call.func.id == "StateSpec":
            kind, layout = call.args[0], call.args[3]
            named = kinds.get(kind.id, []) if isinstance(kind, ast.Name) else [_text(kind)]
            shown = texts.get(layout.id, "") if isinstance(layout, ast.Name) else _text(layout)
            yield from ((name, shown) for name in named)


def _text(node: ast.AST) -> str:
    """A text in the source; of a choice in an f-string, all that it can be."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return "/".join(filter(None, map(_text, ast.walk(node.value))))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _recurrences(tree: ast.Module) -> Iterator[str]:
    """Folders of :mod:`edgelin.recurrences` that a mixer imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").count("recurrences."):
            folder = str(node.module).split("recurrences.")[1].split(".")[0]
            if (_ROOT / _RECURRENCES / folder / "onnx.py").is_file():
                yield folder


def _has_fused(recurrence: str) -> bool:
    """Whether the fused form of a recurrence is another than the plain one."""
    source = ast.parse((_ROOT / _RECURRENCES / recurrence / "onnx.py").read_text("utf-8"))
    return any(isinstance(n, ast.FunctionDef) and n.name == "fused" for n in source.body)


__all__ = ["Family", "Mixer", "families", "mixer"]
