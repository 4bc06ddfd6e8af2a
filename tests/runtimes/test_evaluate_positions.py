"""Bits per byte by position, against the sums of a float64 loop over every stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import edgelin
from edgelin.cli import main
from edgelin.errors import EdgelinError
from edgelin.runtimes import evaluate_positions
from edgelin.runtimes.evaluate_positions import by_position
from edgelin.runtimes.text import TextCodec

TEXT = "The old mill of Köln.<|end|>A quiet 日 river 🙂 runs past; naïve café 0123\n" * 9


@pytest.mark.parametrize("length", [1, 64, 70, 140])
def test_spans_are_sums_over_the_streams(
    tiny: Any, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_positions, "_ROWS", 3)
    codec = TextCodec(tiny.path / "tokenizer.json", tiny.vocab_size)
    ids = codec.encode(TEXT)
    rows = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    assert len(rows) % 3 or length == 1
    bits, sizes = np.zeros((len(rows), length)), np.zeros((len(rows), length))
    for i, row in enumerate(rows):
        logits, _ = tiny.reference([0, *row[:-1]])
        for t, token in enumerate(row):
            log_p = logits[t, token] - np.log(np.exp(logits[t]).sum())
            bits[i, t] = -log_p / np.log(2)
            sizes[i, t] = len(codec.source_bytes(token))
    found = by_position(edgelin.load(tiny.path, threads=1), TEXT, length)
    ends = [end for end in (64, 128) if end < length]
    spans = list(zip([0, *ends], [*ends, length], strict=True))
    assert [(span.first - 1, span.last) for span in found] == spans
    for span, (start, end) in zip(found, spans, strict=True):
        part = slice(start, end)
        assert span.streams == len(rows)
        total = bits[:, part].sum() / sizes[:, part].sum()
        assert span.bits_per_byte == pytest.approx(total, rel=1e-5)
        own = bits[:, part].sum(1) / sizes[:, part].sum(1)
        error = np.sqrt(own.var(ddof=1) / len(rows))
        assert span.standard_error == pytest.approx(error, rel=1e-3)


def test_a_short_text_is_refused(tiny: Any) -> None:
    bundle = edgelin.load(tiny.path, threads=1)
    with pytest.raises(EdgelinError, match=r"the text has .* tokens, a stream has 9999"):
        by_position(bundle, TEXT, 9999)
    with pytest.raises(EdgelinError, match="by-position is 0"):
        by_position(bundle, TEXT, 0)


def _eval(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["eval", *map(str, arguments)])


def test_command(tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "t.txt").write_text(TEXT)
    given = [tiny.path, "--text", tmp_path / "t.txt", "--by-position", 70]
    done = _eval(*given, "--plot", tmp_path / "p.png")
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["positions", "1-64", "65-70"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(_eval(*given, "--json").stdout)[1]["first"] == 65
    for more in (["--against", tiny.path], ["--features", "x.npz"]):
        assert _eval(*given, *more).exit_code == 1
    refused = _eval(tiny.path, "--text", tmp_path / "t.txt", "--plot", tmp_path / "q.png")
    assert "--plot draws --by-position" in refused.stderr
