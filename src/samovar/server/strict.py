"""What does a body say? JSON and form values, read so strictly that no two readers could differ about them."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from .failures import Refusal

_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,18})", flags=re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?", flags=re.ASCII)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. What JSON leaves open is refused: NaN, numbers that overflow, names given twice,
    bytes that are no UTF-8, halves of characters."""
    try:
        text = body.decode("utf-8")
        content = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"The body is not UTF-8: byte {error.start} cannot be read.", code="invalid_json") from error
    except RecursionError as error:
        raise Refusal(400, "The body is nested too deeply. A flat object was expected.", code="invalid_json") from error
    except ValueError as error:  # Both no JSON at all and a number with thousands of digits.
        raise Refusal(400, f"The body is no JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise Refusal(400, f"The body must be a JSON object, not {type(content).__name__}.", code="invalid_json")
    for name, value in content.items():
        check_text(name, "A name in the body", None)
        if isinstance(value, str):
            check_text(value, name, name)
    return content


def check_text(text: str, what: str, param: str | None) -> None:
    """Refuse half a character: JSON can write one, and nothing after us can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{what} holds half a character (a lone surrogate) at position {error.start}. Send it whole."
        raise Refusal(400, message, param=param, code="invalid_value") from error


def read_whole(text: str) -> int | str:
    """A form's text as a whole number in plain digits; the text itself where it is none."""
    return int(text) if _WHOLE.fullmatch(text) else text


def read_number(text: str) -> float | str:
    return float(text) if _NUMBER.fullmatch(text) else text


def read_flag(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name[:50]!r} is given twice")
        found[name] = value
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:50]} is too large a number")
    return value
