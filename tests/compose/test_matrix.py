"""Every combination gives what its cache alone gives: all pairs by default, the whole matrix under `slow`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from compose.matrix import (
    FACTORS,
    MOST_DIFFERENT,
    Case,
    Drawn,
    all_cases,
    difference,
    draw,
    draw_all,
    pairs,
    pairwise,
)
from ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "combine.md"
BEGIN, END = "<!-- the matrix, written by `make test-slow` -->\n", "<!-- end of the matrix -->\n"
PAIRWISE = pairwise(all_cases())


@pytest.fixture(scope="module")
def references() -> dict[Case, Drawn]:
    """What each cache gives alone, made once."""
    return {}


def check(case: Case, drawn: Drawn, reference: Drawn) -> float:
    """How far a case is from its reference; what it did must be the same."""
    # With branches on several ranks, a rank has all steps of its own branches and the first one of the others.
    whole = {mask for mask in drawn.masks if len(mask) > 1}
    assert whole == set(reference.masks), case
    assert bool(drawn.masks) == (case.cache != "none")
    if case.cache != "none":
        assert any("." in mask for mask in drawn.masks), "nothing was skipped"
    assert drawn.is_bare, case
    assert bool(drawn.num_streamed) == (case.offload in ("layerwise", "budget", "ahead"))
    assert bool(drawn.ahead) == (case.offload == "ahead")
    # On ranks the first forward of each form runs a second time, to be compared, and computes its layers then.
    assert all(one.found_forwards for one in drawn.ahead), (case, drawn.ahead)
    assert case.num_ranks > 1 or not any(one.live_calls for one in drawn.ahead), (case, drawn.ahead)
    apart = difference(drawn.picture, reference.picture)
    assert apart <= (0.0 if case.num_ranks == 1 else MOST_DIFFERENT), (case, apart)
    return apart


def run(cases: Sequence[Case], ranks: Ranks, references: dict[Case, Drawn]) -> dict[Case, float]:
    """How far each case is from its reference; those on ranks are asked of them all at once."""
    found: dict[Case, float] = {}
    for case in cases:
        if case.reference not in references:
            references[case.reference] = draw(case.reference)
    together = [case for case in cases if case.num_ranks > 1]
    answers = ranks.call(draw_all, together, limit_s=3600.0)
    for number, case in enumerate(together):
        found[case] = max(check(case, drawn[number], references[case.reference]) for drawn in answers)
    for case in cases:
        if case.num_ranks == 1:
            found[case] = check(case, draw(case), references[case.reference])
    return found


@pytest.mark.parametrize("name", FACTORS["pipeline"])
def test_every_two_settings_go_together(name: str, ranks: Ranks, references: dict[Case, Drawn]) -> None:
    cases = [case for case in PAIRWISE if case.pipeline == name]
    assert run(cases, ranks, references).keys() == set(cases)


def test_auto_goes_with_everything(ranks: Ranks, references: dict[Case, Drawn]) -> None:
    """Ranks choose the same forecasts, too: of their tokens each sees its own, and they add up."""
    cases = [
        Case(name, "auto", offload, number, guidance)
        for name, offload in (("flux", "none"), ("qwen-image", "budget"), ("sd3", "layerwise"))
        for number in ("1 rank", "Ulysses 2", "ring 2")
        for guidance in FACTORS["guidance"]
    ]
    assert run(cases, ranks, references).keys() == set(cases)


def test_layers_computed_ahead_go_with_everything(ranks: Ranks, references: dict[Case, Drawn]) -> None:
    cases = [Case(name, cache, "ahead", "1 rank", "two branches")
             for name in ("flux", "wan") for cache in (*FACTORS["cache"], "auto")]  # fmt: skip
    cases += [Case("flux", "measured", "ahead", number, "two branches") for number in FACTORS["ranks"][1:]]
    assert run(cases, ranks, references).keys() == set(cases)


@pytest.mark.parametrize("guidance", FACTORS["guidance"])
def test_auto_with_branches_on_two_ranks(guidance: str, ranks: Ranks) -> None:
    """Both skip as the first one sees it."""
    case = Case("flux", "auto", "none", "CFG 2", guidance)
    (first,), (second,) = ranks.call(draw_all, [case], limit_s=600.0)
    assert torch.equal(first.picture, second.picture)
    (whole,) = {mask for drawn in (first, second) for mask in drawn.masks if len(mask) > 1}
    assert whole.startswith("###.#"), "the first gap is of one step"
    assert difference(first.picture, draw(case.reference).picture) < 0.1


def test_the_cover_has_every_pair_and_few_cases() -> None:
    assert {pair for case in PAIRWISE for pair in pairs(case)} == {pair for c in all_cases() for pair in pairs(c)}
    assert len(PAIRWISE) <= 24
    assert len(all_cases()) == 4 * 3 * 4 * 4 * 2


@pytest.mark.slow
def test_the_whole_matrix(ranks: Ranks, references: dict[Case, Drawn]) -> None:
    found: dict[Case, float] = {}
    for name in FACTORS["pipeline"]:
        found |= run([case for case in all_cases() if case.pipeline == name], ranks, references)
    assert set(found) == set(all_cases())
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    PAGE.write_text(head + BEGIN + table(found) + END + rest.split(END)[1], encoding="utf-8")


def table(found: dict[Case, float]) -> str:
    """A row for each cache and offload: the greatest difference among all pipelines and guidances."""
    columns = FACTORS["ranks"]
    lines = [f"| cache | offload | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for cache in FACTORS["cache"]:
        for offload in FACTORS["offload"]:
            cells = []
            for ranks in columns:
                wanted = {"cache": cache, "offload": offload, "ranks": ranks}
                some = [apart for case, apart in found.items() if wanted.items() <= case._asdict().items()]
                cells.append("same bits" if max(some) == 0.0 else f"{max(some):.0e}")
            lines.append(f"| {cache} | {offload} | {' | '.join(cells)} |")
    versions = f"torch {torch.__version__.partition('+')[0]}"
    worst = max(found.values())
    foot = f"{len(found)} combinations were run and hold; the greatest difference is {worst:.1e} ({versions}).\n"
    return "\n".join(lines) + "\n\n" + foot


def test_the_page_has_the_whole_matrix() -> None:
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (.*) \|$", shown, flags=re.MULTILINE)
    assert [(cache, offload) for cache, offload, _ in rows[1:]] == [
        (cache, offload) for cache in FACTORS["cache"] for offload in FACTORS["offload"]
    ]
    assert f"{len(all_cases())} combinations were run and hold" in shown
    for _, _, cells in rows[1:]:
        values = cells.split(" | ")
        assert values[0] == "same bits"
        assert all(value == "same bits" or float(value) <= MOST_DIFFERENT for value in values)
