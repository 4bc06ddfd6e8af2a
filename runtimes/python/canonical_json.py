"""JSON in one spelling (RFC 8785), and the digest of a manifest that is made of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(content: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON (RFC 8785) of a manifest without its key ``digest``."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(canonical_json(rest).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """RFC 8785: sorted keys, no spaces, unescaped UTF-8, numbers as ECMAScript prints them."""
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join(f"{_text(key)}:{canonical_json(value[key])}" for key in keys) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(canonical_json(item) for item in value) + "]"
    if isinstance(value, float):
        return _number(value)
    return _text(value)


def _text(value: Any) -> str:
    """JSON of a string, an integer, true, false or null."""
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    """A float as ECMAScript's Number.prototype.toString writes it."""
    if value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    shortest = repr(value)
    mantissa, _, exponent = shortest.partition("e")
    power = int(exponent or "0")
    if -7 < power < 0:  # Python turns to exponents at 1e-5, ECMAScript at 1e-7
        sign = "-" if value < 0 else ""
        digits = mantissa.lstrip("-").replace(".", "")
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    return f"{mantissa}e{power:+d}" if exponent else shortest
