"""Makes something valid slightly wrong: bytes, JSON, and lines of text, each by a few random changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = [0, -1, 1, 2, 3, 7, 64, 1000, 2**31, 2**63, 10**30, -(2**63), 0.5, -0.0, 1e308, 1e-308]
TEXTS = ["", " ", "x", "0", "null", "true", "é", "\u0000", "\ud800", "\u202e", "../..", "/etc/passwd", "~nobody/x", "~",
         "a" * 5000, "<!--<script>", "%s%n", "{}", "{{ x.__class__ }}", "nan", "inf", "-1", "1e999", "cuda:99", "cpu",
         "None", "__class__", "diffusers", "FluxPipeline", "a.json", "x/y", "\\", "\r\n", "*", "$(id)", "bfloat16",
         "float16", "auto", "12GiB", "-1GiB", "1e99GiB"]  # fmt: skip
SPECIAL = [None, True, False, [], {}, [[]], {"": {}}, [None], [1, "a", {}], float("nan"), float("inf"), float("-inf")]


def weird(random: Random) -> Any:
    """A value that fits hardly anywhere."""
    kind = random.randrange(8)
    if kind == 0:
        return [weird(random) for _ in range(random.randrange(4))]
    if kind == 1:
        return {random.choice(TEXTS): weird(random) for _ in range(random.randrange(4))}
    if kind == 2 and random.random() < 0.1:
        deep: Any = 0
        for _ in range(random.choice([50, 70, 100])):
            deep = [deep] if random.random() < 0.5 else {"a": deep}
        return deep
    return copy.deepcopy(random.choice(random.choice([NUMBERS, TEXTS, SPECIAL])))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with every key or number of it."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 2000:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys]
    return found


def changed_json(random: Random, value: Any, weird: Callable[[Random], Any] = weird) -> Any:
    """A value with one to three of its parts replaced, removed, doubled or swapped."""
    value = copy.deepcopy(value)
    for _ in range(random.randrange(1, 4)):
        found = places(value)
        if not found:
            return weird(random)
        container, key = random.choice(found)
        kind = random.randrange(10)
        if kind < 6:
            container[key] = weird(random)
        elif kind == 6:
            del container[key]
        elif kind == 7 and isinstance(container, dict):
            container[random.choice([random.choice(TEXTS), f"{key}_", str(key)[:-1]])] = container[key]
        elif kind == 8:
            other, place = random.choice(found)
            container[key] = copy.deepcopy(other[place]) if isinstance(other, dict) and place in other else None
        else:
            container[key] = [container[key]]
    return value


def written(random: Random, value: Any) -> bytes:
    """The value as JSON: mostly as it should be, sometimes with its bytes changed or a name twice."""
    text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    if random.random() < 0.1 and text.startswith("{") and len(text) > 2:
        text = '{"_class_name": 1, ' + text[1:]
    if random.random() < 0.02:
        text = random.choice("[{") * 20_000 + text
    data = text.encode("utf-8", "surrogatepass")
    return changed_bytes(random, data) if random.random() < 0.2 else data


def changed_bytes(random: Random, data: bytes, most: int = 4) -> bytes:
    """Bytes with one or more changes: flipped, cut, doubled, removed, filled, or a number at its limits."""
    found = bytearray(data)
    for _ in range(random.randint(1, most)):
        at = random.randrange(len(found) + 1)
        # Mostly near the beginning, where headers are.
        at = min(at, int(random.expovariate(0.02))) if random.random() < 0.5 else at
        length = random.choice([1, 1, 2, 4, 8, 64, 500])
        kind = random.randrange(8)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            found[at : at + length] = random.randbytes(len(found[at : at + length]))
        elif kind == 2:
            del found[at : at + length]
        elif kind == 3:
            found[at:at] = found[at : at + length]
        elif kind == 4:
            found[at:at] = random.randbytes(length)
        elif kind == 5:
            found[at : at + length] = bytes([random.choice([0, 1, 0x7F, 0x80, 0xFF])]) * length
        elif kind == 6 and random.random() < 0.3:
            del found[at:]
        else:
            number = random.choice([0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1])
            found[at : at + 4] = number.to_bytes(4, random.choice(["big", "little"]))
    return bytes(found)
