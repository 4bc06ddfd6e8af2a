"""What every quantised variant of some bundles costs: on a text, and in texts that they write.

The first bundle has the float variant that all others are compared with, in one pass over the text:
bits per byte, KL(float || variant) in nat, and how often both rank the same token first. Then each
variant writes a few texts from the end token, at temperature 0.8. A text degenerates when it
repeats itself: its share of repeated 4-grams is 1 - distinct 4-grams / 4-grams, of tokens.

    python benchmarks/quantisation.py BUNDLE... --text held-out.txt --out docs/quantisation
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import edgelin
from edgelin.runtimes.distribution import log_softmax
from edgelin.runtimes.evaluate import text_tokens
from edgelin.runtimes.manifest import Manifest
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.text_file import read_text

GRAM = 4
TEMPERATURE = 0.8


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--text", required=True, help="text that no variant was calibrated with")
    parser.add_argument("--tokens", type=int, default=32_768, help="of the text")
    parser.add_argument("--written", type=int, default=2000, help="tokens of a written text")
    parser.add_argument(
        "--seeds", type=int, default=3, help="written texts of each variant; 0: none"
    )
    parser.add_argument("--threads", type=int, help="default: physical cores")
    parser.add_argument("--out", type=Path, default=Path("quantisation"), help="name of the file")
    options = parser.parse_args()
    opened = {
        f"{path.name}/{name}": edgelin.load(path, variant=name, threads=options.threads)
        for path in options.bundles
        for name in Manifest.read(path).variants
    }
    float_name = next(name for name in opened if name.endswith("/model"))
    opened = {float_name: opened.pop(float_name), **opened}
    found = read(opened, read_text(options.text), options.tokens)
    for name, bundle in opened.items():
        rates = [repetition(bundle, options.written, seed) for seed in range(options.seeds)]
        found[name]["repeated_4grams"] = [round(rate, 4) for rate in rates]
        found[name]["bytes"] = sum(
            record.bytes for record in bundle.manifest.variants[bundle.variant].files.values()
        )
    content = {"tokens": options.tokens, "written": options.written, "variants": found}
    options.out.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
    print(table(found))


def read(opened: dict[str, Bundle], text: str, tokens: int) -> dict[str, dict[str, Any]]:
    """Every variant on the first tokens of a text, beside the first one."""
    first = next(iter(opened.values()))
    tokenizer = first.manifest.tokenizer
    assert tokenizer is not None
    ids, size = text_tokens(first.text, text, tokenizer.eos_token_id, tokens)
    streams = [bundle.stream(capsule="none") for bundle in opened.values()]
    sums = np.zeros((len(streams), 3))
    for start in tqdm(range(0, len(ids) - 1, first.manifest.chunk), unit="chunk", disable=None):
        part = ids[start : start + first.manifest.chunk + 1]
        at = np.arange(len(part) - 1)
        truth: NDArray[Any] | None = None
        for row, stream in enumerate(streams):
            logs = log_softmax(stream.feed(part[:-1], all_logits=True)).astype(np.float64)
            truth = logs if truth is None else truth
            kl = float((np.exp(truth) * (truth - logs)).sum())
            same = float((truth.argmax(-1) == logs.argmax(-1)).sum())
            sums[row] += (-float(logs[at, part[1:]].sum()), kl, same)
    count = len(ids) - 1
    return {
        name: {
            "bits_per_byte": nats / np.log(2) / size,
            "relative": nats / sums[0][0] - 1,
            "kl": kl / count,
            "top1": same / count,
        }
        for name, (nats, kl, same) in zip(opened, sums, strict=True)
    }


def repetition(bundle: Bundle, tokens: int, seed: int) -> float:
    """Share of repeated 4-grams in a text that a variant writes."""
    stream, random = bundle.stream(capsule="none"), np.random.default_rng(seed)
    assert bundle.manifest.tokenizer is not None
    written = [bundle.manifest.tokenizer.eos_token_id]
    while len(written) <= tokens:
        logits = stream.feed(written[-1:]) / TEMPERATURE
        cumulative = np.exp(log_softmax(logits).astype(np.float64)).cumsum()
        written.append(int(np.searchsorted(cumulative, random.uniform(0, cumulative[-1]))))
    grams = [tuple(written[i : i + GRAM]) for i in range(1, len(written) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| variant | MB | bits per byte | beside float | KL, nat | top-1 same | repeated 4-grams |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, one in found.items():
        rates = one["repeated_4grams"]
        repeated = "-"
        if rates:
            least, mean, most = (100 * x for x in (min(rates), sum(rates) / len(rates), max(rates)))
            repeated = f"{mean:.1f} % ({least:.1f} to {most:.1f})"
        lines.append(
            f"| {name} | {one['bytes'] / 1e6:.1f} | {one['bits_per_byte']:.4f} | "
            f"{100 * one['relative']:+.2f} % | {one['kl']:.4f} | {100 * one['top1']:.1f} % | "
            f"{repeated} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
