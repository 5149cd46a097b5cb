"""The words that go with a picture, and the pictures that are never shown with theirs.

Pure and seeded: the same rows and seed give the same captions and the same held-out pairs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from training.pictures import Row

HELD_OUT_SHARE = 0.05
VARIANTS = 16  # captions kept for each picture
PLAIN = 6  # how many of them are the plain caption, the one the evaluation asks for


def caption(row: Row) -> str:
    """The plain caption: "NAME, STYLE style"."""
    return f"{row.name}, {row.style} style"


def with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def _varied(row: Row, rng: random.Random) -> str:
    """One of the freer captions: article, word order, no style, keywords, group.

    A few leave the name out, so that the style word means something on its own.
    """
    name, style, a_name = row.name, f"{row.style} style", with_article(row.name)
    tags = rng.sample(row.tags, min(len(row.tags), rng.randint(1, 4)))
    words = ", ".join(tags)
    forms = [
        (3.0, f"{a_name}, {style}"),
        (1.0, name),
        (1.0, a_name),
        (1.0, f"{name} emoji, {style}"),
        (1.0, f"{style} emoji of {a_name}"),
        (1.0, f"{style} {name}"),
        (0.5, f"{row.group}, {name}, {style}"),
        (0.7, f"{row.group}, {style}"),
    ]
    if tags:
        forms += [(1.5, f"{name}, {words}, {style}"), (0.5, f"{words}, {name}, {style}")]
        forms += [(0.8, f"{words}, {style}")]
    weights, texts = zip(*forms, strict=True)
    return rng.choices(texts, weights)[0]


def captions(row: Row, rng: random.Random, count: int = VARIANTS) -> list[str]:
    """`count` captions for a picture, the plain one several times over."""
    plain = min(count, PLAIN)
    return [caption(row)] * plain + [_varied(row, rng) for _ in range(count - plain)]


def all_captions(rows: Sequence[Row], seed: int = 0, count: int = VARIANTS) -> list[list[str]]:
    """The captions of every picture, a list for each row."""
    rng = random.Random(seed)
    return [captions(row, rng, count) for row in rows]


def held_out(rows: Sequence[Row], share: float = HELD_OUT_SHARE, seed: int = 0) -> list[int]:
    """The rows kept out of training: at most one style of an emoji that has at least two.

    So each held-out pair asks for an emoji that was seen, in a style that was seen, but never
    for both together. The share is of all pairs of such emoji; the styles take turns.
    """
    if not 0 <= share < 0.5:
        raise ValueError(f"held-out share {share} must be at least 0 and below 0.5")
    by_emoji: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_emoji.setdefault(row.hexcode, []).append(index)
    several = {code: pairs for code, pairs in by_emoji.items() if len(pairs) > 1}
    count = round(share * sum(map(len, several.values())))
    rng = random.Random(seed)
    codes = rng.sample(sorted(several), min(count, len(several)))
    return sorted(several[code][turn % len(several[code])] for turn, code in enumerate(codes))


def training_rows(rows: Sequence[Row], share: float = HELD_OUT_SHARE, seed: int = 0) -> list[int]:
    """All rows that are not held out."""
    kept_out = set(held_out(rows, share, seed))
    return [index for index in range(len(rows)) if index not in kept_out]


COMBINATIONS = [
    "red cat", "blue dog face", "green heart with stars", "golden robot",
    "purple penguin", "orange octopus", "pink car", "blue apple",
    "cat with a crown", "dog with sunglasses", "pizza and hamburger", "snowman on fire",
    "rocket and moon", "frog in a teacup", "ghost with a hat", "unicorn and rainbow",
    "crying pizza", "smiling sun with glasses", "angry tomato", "two hearts and a star",
    "fox in the snow",
]  # fmt: skip


def new_combinations(rows: Sequence[Row], count: int = 64, seed: int = 0) -> list[str]:
    """Prompts nobody drew: every combination in three styles, then a held-out pair or two."""
    styles = list(dict.fromkeys(row.style for row in rows))
    prompts = [f"{words}, {style} style" for words in COMBINATIONS for style in styles]
    prompts += [caption(rows[index]) for index in held_out(rows, seed=seed)]
    return prompts[:count]
