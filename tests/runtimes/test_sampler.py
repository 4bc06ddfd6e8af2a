"""The sampler against a slow float64 one that is written from the definitions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes.sampler import Sampler, Sampling, uniform


def _allowed(logits: NDArray[np.float64], options: Sampling, recent: list[int]) -> dict[int, float]:
    """Probability of every token that may be drawn."""
    scores = [float(x) for x in logits]
    for token in set(recent):
        r = options.repetition_penalty
        scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    scores = [x / options.temperature for x in scores]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    order = order[: options.top_k] if options.top_k else order
    total = sum(np.exp(scores[i]) for i in order)
    probability = {i: float(np.exp(scores[i]) / total) for i in order}
    kept, summed = [], 0.0
    for i in order:
        kept.append(i)
        summed += probability[i]
        if summed >= options.top_p:
            break
    kept = [i for i in kept if probability[i] >= options.min_p * probability[order[0]]]
    rest = sum(probability[i] for i in kept)
    return {i: probability[i] / rest for i in kept}


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0, "top_p": 1.0, "temperature": 1.0},
        {"top_k": 5, "top_p": 1.0, "temperature": 0.7},
        {"top_k": 0, "top_p": 0.6, "temperature": 1.5},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.3},
        {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.7},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "temperature": 0.8},
    ],
)
def test_frequencies_follow_the_definition(options: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).standard_normal(20) * 2
    recent = [0, 3, 3, 7]
    count = 4000
    sampler = Sampler(Sampling(seed=1, **options))
    drawn = Counter(
        sampler.choose(logits.astype(np.float32), recent, position) for position in range(count)
    )
    expected = _allowed(logits, Sampling(**options), recent)
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        deviation = (count * probability * (1 - probability)) ** 0.5
        assert abs(drawn[token] - count * probability) <= 5 * deviation + 1


def test_temperature_zero_takes_the_largest() -> None:
    logits = np.array([0.0, 3.0, 3.0, -1.0], np.float32)
    sampler = Sampler(Sampling(temperature=0))
    assert sampler.choose(logits, [], 0) == 1
    penalised = Sampler(Sampling(temperature=0, repetition_penalty=1.1))
    assert penalised.choose(logits, [1], 0) == 2
    assert penalised.choose(-logits - 1, [0], 0) == 3  # a negative score is multiplied


def test_top_k_keeps_exactly_k_of_equal_scores() -> None:
    sampler = Sampler(Sampling(top_k=3, top_p=1, seed=0))
    logits = np.zeros(50, np.float32)
    assert {sampler.choose(logits, [], p) for p in range(200)} == {0, 1, 2}


def test_at_least_one_token_is_kept() -> None:
    sampler = Sampler(Sampling(top_p=1e-9, min_p=1, seed=0, top_k=0))
    assert sampler.choose(np.array([1.0, 2.0, 0.0], np.float32), [], 0) == 1


def test_large_logits_do_not_overflow() -> None:
    sampler = Sampler(Sampling(seed=0, temperature=1e-3))
    assert sampler.choose(np.array([3e38, -3e38], np.float32), [], 0) == 0


def test_uniform_is_splitmix64() -> None:
    # First outputs of the reference implementation (Vigna, splitmix64.c) for the seed 1234567.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [uniform(1234567, i) for i in range(3)] == [(x >> 11) / 2**53 for x in outputs]
    draws = np.array([uniform(0, i) for i in range(5000)])
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.02


def test_same_seed_same_draws() -> None:
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)

    def draws(seed: int) -> list[int]:
        sampler = Sampler(Sampling(seed=seed))
        return [sampler.choose(logits, [], position) for position in range(20)]

    assert draws(7) == draws(7) != draws(8)
    assert Sampling().seed != Sampling().seed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_are_told(value: float) -> None:
    with pytest.raises(EdgelinError, match="logits are not finite at position 12"):
        Sampler(Sampling()).choose(np.array([0.0, value], np.float32), [], 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1; allowed: 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ("a", "")}, "stop is ''"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 2.0), ("max_tokens", None), ("max_tokens", True), ("top_k", "4"),
     ("top_k", 1.5), ("seed", 1.5), ("seed", "1"), ("temperature", "1"), ("temperature", None),
     ("temperature", 10**400), ("temperature", True), ("top_p", float("nan")), ("min_p", [0.1]),
     ("repetition_penalty", 1j), ("stop", None), ("stop", 3), ("stop", [b"x"]), ("stop", ["a", ""]),
     ("stop", ""), ("stop", b"ab")],
)  # fmt: skip
def test_settings_of_another_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(EdgelinError, match=name) as caught:
        Sampling(**{name: value})
    assert "\n" not in str(caught.value)


def test_other_forms_of_settings() -> None:
    found = Sampling(
        stop="xy", seed=np.int64(7), top_k=np.int32(2), temperature=np.float32(0.5), top_p=1
    )
    assert found == Sampling(stop=("xy",), seed=7, top_k=2, temperature=0.5, top_p=1.0)
    assert type(found.seed) is int and type(found.top_p) is float
    drawn = {Sampling(seed=None).seed for _ in range(4)} | {Sampling().seed for _ in range(4)}
    assert len(drawn) > 1 and None not in drawn


@pytest.mark.parametrize("temperature", [1e-320, 1e-308, 1e-300, 1e-9, 1e308])
@pytest.mark.parametrize("penalty", [1e-308, 1.0, 1e308])
@pytest.mark.parametrize("top_k", [0, 5])
def test_extreme_settings(temperature: float, penalty: float, top_k: int) -> None:
    """They give a token without a warning; a tiny temperature gives the likeliest."""
    logits = np.random.default_rng(0).standard_normal(20).astype(np.float32) * 20
    options = {"repetition_penalty": penalty, "top_k": top_k, "seed": 3}
    token = Sampler(Sampling(temperature=temperature, **options)).choose(logits, [1, 2], 5)
    if temperature < 1:
        assert token == Sampler(Sampling(temperature=0, **options)).choose(logits, [1, 2], 5)
