"""Whose curve is better? Our settings and those of others, on the same prompts, seeds and attention, in one process.

A setting that looks at the pictures decides for a batch as one, where it would decide for each picture alone in use.
So some pictures are made alone as well, and both figures stand beside each other. A fixed rhythm or schedule does the
same to a picture in any company, up to the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import SettingError
from .methods import Method, ours, plain
from .peers import PEER_FAILS, peers
from .schedules import SchedulePlanner, choose_planner, refine, scheduled
from .session import Row, Session

PLAIN_SHARES = (0.66, 0.5, 0.4, 0.32, 0.24, 0.2)
"""Fewer plain steps, as parts of the exact number."""
SCHEDULE_SHARES = (0.54, 0.4, 0.32, 0.24, 0.2)
"""Computed steps of our schedules: 27, 20, 16, 12 and 10 of 50."""


KINDS = (
    "plain steps", "schedule, computed (fitted, more for hard pictures)", "forecast rel_l1_thresh",
    "tea_cache rel_l1_thresh", "diffusers FirstBlockCache", "diffusers TaylorSeer lite", "diffusers MagCache",
    "diffusers SeaCache", "cache-dit DBCache", "cache-dit DBCache + Taylor",
)  # fmt: skip
"""What its names begin with; numbers follow."""


def check_only(words: Sequence[str], extra: Sequence[Method] = ()) -> None:
    """Refuse words that no name will have, before hours are spent on what the names depend on."""
    known = [*KINDS, *(method.name for method in extra)]
    for word in words:
        # A word of a name that is made later, such as a number, cannot be judged yet.
        is_kind = any(word.lower() in name.lower() or name.split()[0].lower() in word.lower() for name in known)
        if not is_kind and not any(sign.isdigit() for sign in word):
            raise SettingError(f"--only {word!r} is in no method's name. There are: {', '.join(known)}.")


def our_methods(tuning: Session, refinements: int = 0) -> list[Method]:
    """Schedules planned on a session's tasks, and caches that decide by the signal. `refinements` is how many changes
    of each schedule are tried on the same tasks."""
    shares = (round(share * tuning.studio.steps) for share in SCHEDULE_SHARES)
    found = []
    for count in sorted({max(SchedulePlanner.fewest, share) for share in shares}):
        planner = choose_planner(tuning, lambda row: row.nearness, count).planner
        mask = planner.plan(count)
        if refinements:
            mask = refine(mask, _score(tuning, planner), refinements)
        settings = planner.settings(mask)
        found.append(ours("tea_cache", settings, f"schedule, {count} computed ({planner})", "samovar schedule"))
    found += [ours("forecast", {"rel_l1_thresh": threshold}) for threshold in (0.2, 0.4, 0.8)]
    return found + [ours("tea_cache", {"rel_l1_thresh": threshold}) for threshold in (0.1, 0.2, 0.4)]


def _score(session: Session, planner: SchedulePlanner) -> Callable[[str], float]:
    return lambda mask: session.measure(scheduled(planner.settings(mask))).nearness


def plain_methods(steps: int) -> list[Method]:
    """What any cache must beat."""
    return [plain(number) for number in sorted({max(1, round(share * steps)) for share in PLAIN_SHARES}, reverse=True)]


def all_methods(tuning: Session, extra: Sequence[Method] = (), refinements: int = 0) -> list[Method]:
    """Everything that the bench compares; what needs figures of the model takes them from the prompts for tuning."""
    studio = tuning.studio
    others = peers(studio, studio.batches(tuning.tasks)[0])
    return [*plain_methods(studio.steps), *our_methods(tuning, refinements=refinements), *extra, *others]


def bench(
    session: Session,
    methods: Sequence[Method],
    alone: Session | None = None,
    tell: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """A row for each method, as JSON. Where a peer fails, or pictures are no numbers, the row says so; a failure of
    our own is raised. `alone` makes some of the pictures again, one at a time, with the methods for which that
    matters. `tell` is told whose turn it is."""
    rows: list[dict[str, Any]] = [session.exact().to_dict()]
    for method in methods:
        tell(method.name)
        try:
            row = session.measure(method)
            apart = alone.measure(method) if alone is not None and method.is_adaptive else None
        except PEER_FAILS as error:
            if not method.is_peer:
                raise
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            rows.append({"method": method.name, "family": method.family, "problem": problem})
            continue
        bad = _without_figures(row) + (_without_figures(apart) if apart is not None else 0)
        if bad:
            problem = f"{bad} pictures are no numbers, so nothing can be said of them"
            rows.append({"method": method.name, "family": method.family, "problem": problem})
            continue
        rows.append(row.to_dict() | ({} if apart is None else {"alone": _beside(apart, row)}))
    mark_best(rows)
    return rows


def _without_figures(row: Row) -> int:
    """How many pictures have a figure that is no number: it would be neither better nor worse than any."""
    return sum(not all(map(math.isfinite, quality)) for quality in row.pictures)


def _beside(alone: Row, together: Row) -> dict[str, Any]:
    """The same pictures made alone and in a batch."""
    count = len(alone.pictures)
    same = together.pictures[:count]
    return {
        "pictures": count,
        "computed": alone.computed,
        "speedup": round(alone.speedup, 3),
        "psnr": round(alone.quality.psnr, 3),
        "lpips": round(alone.quality.lpips, 7),
        "psnr_in_batch": round(sum(quality.psnr for quality in same) / count, 3),
        "lpips_in_batch": round(sum(quality.lpips for quality in same) / count, 7),
    }


def mark_best(rows: list[dict[str, Any]]) -> None:
    """Note of each row whether any other computes no more steps and is nearer, by PSNR and by LPIPS."""
    measured = [row for row in rows if "problem" not in row and row["family"] != "exact"]
    for row in measured:
        rivals = [other for other in measured if other is not row and other["computed"] <= row["computed"]]
        row["is_best_by_psnr"] = not any(other["psnr"] > row["psnr"] for other in rivals)
        row["is_best_by_lpips"] = not any(other["lpips"] < row["lpips"] for other in rivals)
