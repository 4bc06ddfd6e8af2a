"""Writes ``docs/families.md``: ``python -m edgelin.families > docs/families.md`` in a checkout."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from edgelin import catalogue

_TESTS = Path(__file__).parents[2] / "tests" / "families"
_HEAD = """\
# Checkpoints of other projects

<!-- Generated from the code: python -m edgelin.families > docs/families.md -->

`edgelin export`, `import`, `verify` and `eval` take a local folder (`config.json`, safetensors or
`.bin`/`.pth`, a tokenizer) of the families below. A key of the config that might change the numbers
and is not known, or a tensor that nothing uses, is refused by name; code of a folder is never run.

What "checked" means: a tiny random model of the published class (for fla and RWKV: of the published
equations), every parameter off its initial value, is saved and converted, and logits are compared,
within 1e-4 where a test does not say otherwise: full passes of 1 to 150 tokens in batches of 1 and
3, prefill and steps in pieces across the chunk of 64, weights in float32 and bfloat16, and the
exported graphs of the fused and the plain profile in onnxruntime. No published checkpoint was at
hand.
"""
_LAYERS = """\
## Layers

In the fused profile one operator computes each of the recurrences named here; everything else,
and all of it in the plain profile, is written with standard operators. Of attention, "slot" is a
ring of fixed size, "token" a state that grows with every token.

| layer | fused recurrences | states |
| --- | --- | --- |
"""


def document() -> str:
    """The whole page."""
    found = catalogue.families()
    rows = [
        f"| [{f.name}](#{f.name}) | {_code(f.model_types)} | {_code(f.mixers)} |" for f in found
    ]
    table = "\n".join(["| file | `model_type` | layers |", "| --- | --- | --- |", *rows])
    layers = []
    for mixer in map(catalogue.mixer, sorted({name for f in found for name in f.mixers})):
        states = ", ".join(f"`{kind}` [{layout}]" for kind, layout in mixer.states) or "none"
        layers.append(f"| `{mixer.name}` | {_code(mixer.fused) or '-'} | {states} |")
    parts = [_HEAD, table + "\n", *map(_section, found), _LAYERS + "\n".join(layers) + "\n"]
    return "\n".join(parts)


def _section(family: catalogue.Family) -> str:
    """What a family's file and its tests say."""
    about = "\n\n".join(_plain(paragraph) for paragraph in family.about)
    return f"## {family.name}\n\n{about}\n\n{_checked(family.name)}\n"


def _checked(name: str) -> str:
    """The test file of a family, and what its tests are called."""
    stem = max(p.stem for p in _TESTS.glob("test_*.py") if f"test_{name}".startswith(p.stem))
    tree = ast.parse((_TESTS / f"{stem}.py").read_text(encoding="utf-8"))
    about = (ast.get_docstring(tree) or "").split("\n\n")[0].rstrip(".")
    tests = [
        node.name.removeprefix("test_").replace("_", " ")
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    text = f"*Checked (`tests/families/{stem}.py`)*: {_plain(about)}: {'; '.join(tests)}."
    return " ".join(text.split())


def _plain(text: str) -> str:
    """reStructuredText as Markdown."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(document(), end="")
