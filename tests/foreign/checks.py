"""Six checks of each model, through the public API alone. Each returns nothing, or raises."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import samovar
from samovar.cache.hook import UNKNOWN

from . import Case, tensors

STEPS = 12
SHARE = 0.8
"""So much of the weights must rest on a skipped step."""
BACKENDS = ("tea_cache",)
NEVER = {"min_steps": 0, "max_skips": None, "last_steps": 0, "rel_l1_thresh": 1e-12}
"""The cache is active and learns, but nothing is ever near enough to be skipped."""
ALWAYS = NEVER | {"rel_l1_thresh": 1e9}
"""Whatever can be skipped is."""

Outputs = list[list[torch.Tensor]]
"""By step, the tensors of the output."""


class Wrong(AssertionError):
    """An output is not what it should be."""


class NotServed(AssertionError):
    """Nothing is skipped, or too little."""


class SideEffect(AssertionError):
    """Outputs are right, but a hook of the user or the statistics tell something else than what was done."""

    def __init__(self, message: str, share: float | None = None) -> None:
        super().__init__(message)
        self.share = share
        """What `check_served` would have returned."""


class CaseError(AssertionError):
    """The case itself is no good: nothing is said about Samovar."""


def _attach(model: torch.nn.Module, **settings: Any) -> Any:
    return samovar.attach(model, **settings)


def run(case: Case, model: torch.nn.Module, at: Callable[[int], float] = float) -> Outputs:
    """A whole loop. Outputs are copied, in case a model hands out what it keeps."""
    steps = case.inputs()
    outputs: Outputs = []
    for index in range(STEPS):
        args, kwargs = steps(at(index))
        outputs.append([value.clone() for value in tensors(model(*args, **kwargs))])
    return outputs


@lru_cache(maxsize=2)
def bare(case: Case) -> Outputs:
    """The loop without Samovar."""
    return run(case, case.build())


def _same(got: Outputs, expected: Outputs, what: str, steps: Iterator[int] | range = range(STEPS)) -> None:
    for step in steps:
        if len(got[step]) != len(expected[step]) or not all(map(torch.equal, got[step], expected[step])):
            raise Wrong(f"{what}: step {step} differs by {_distance(got[step], expected[step]):.2g}")


def _distance(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The greatest difference, of the size of what was expected."""
    if [value.shape for value in got] != [value.shape for value in expected]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(got, expected, strict=True)]
    return max((float((a - b).abs().max() / b.abs().mean()) for a, b in pairs), default=float("inf"))


# ------------------------------------------------------------------------------------------------ the checks


def check_bare(case: Case) -> None:
    """Two runs give the same bits, and every input counts; else nothing could be said by this case."""
    first = bare(case)
    try:
        _same(run(case, case.build()), first, "two bare runs")
    except Wrong as error:
        raise CaseError(str(error)) from None
    if not first[0] or not all(bool(value.isfinite().all()) for output in first for value in output):
        raise CaseError("an output that is empty or not finite")
    if any(_distance(one, other) < 1e-4 for one, other in itertools.pairwise(first)):
        raise CaseError("two steps have the same output")


def check_exact(case: Case, backend: str) -> None:
    """Where nothing is skipped the bits are those of the bare model, whether the cache rests or works."""
    for settings in ({"rel_l1_thresh": 0}, NEVER):
        model = case.build()
        with _attach(model, cache={"backend": backend, **settings}):
            _same(run(case, model), bare(case), f"threshold {settings['rel_l1_thresh']:g}")


def check_served(case: Case, backend: str) -> float:
    """Steps are skipped, most of the weights rest, and computed steps are exact. Returns the share that rests."""
    model = case.build()
    with _watched() as ran:
        run(case, model)
        usual = ran.pop()
    size = {id(weight): weight.numel() for weight in model.parameters()}
    whole = sum(size[key] for key in usual)
    share, told = 1.0, STEPS
    with _attach(model, cache={"backend": backend, **ALWAYS}) as attached:
        for time in ("the first run", "a second run"):
            outputs: Outputs = []
            steps = case.inputs()
            active: list[float] = []
            for index in range(STEPS):
                args, kwargs = steps(index)
                with _watched() as ran:
                    outputs.append([value.clone() for value in tensors(model(*args, **kwargs))])
                active.append(sum(size.get(key, 0) for key in ran.pop() & usual) / whole)
            computed, count = _computed(attached)
            told = min(told, count)
            if not all(bool(value.isfinite().all()) for output in outputs for value in output):
                raise Wrong(f"{time}: not finite")
            _same(outputs, bare(case), f"{time}, computed", iter(computed))
            resting = [1 - part for index, part in enumerate(active) if index not in computed]
            share = min([share, *resting])
            if share < SHARE:
                raise NotServed(f"only {share:.0%} of the weights rest on a skipped step")
    if told != STEPS:
        raise SideEffect(f"stats() shows {told} of {STEPS} steps", share)
    return share


def check_still(case: Case, backend: str) -> None:
    """Where inputs hardly change, a skipped step is what the model would have given."""
    model, expected = case.build(), run(case, case.build(), at=_hardly)
    with _attach(model, cache={"backend": backend, **ALWAYS}) as attached:
        outputs = run(case, model, at=_hardly)
        _computed(attached)
    worst = max(map(_distance, outputs, expected))
    if not worst < 0.03:
        raise Wrong(f"inputs hardly change, but a skipped step differs by {worst:.2g}")


def check_restored(case: Case, backend: str) -> None:
    """Taken off, nothing of Samovar is left in any module, and the bits are those of the bare model."""
    model = case.build()
    before = _anatomy(model)
    with _attach(model, cache={"backend": backend, **ALWAYS}):
        run(case, model)
    _unchanged(before, _anatomy(model))
    _same(run(case, model), bare(case), "after it is taken off")


def check_offload(case: Case) -> None:
    """The bits are those of the bare model while weights stream, and after."""
    model = case.build()
    before = _anatomy(model)
    with _attach(model, offload={"mode": "layerwise", "device": "cpu"}):
        _same(run(case, model), bare(case), "offloaded")
    _unchanged(before, _anatomy(model))
    _same(run(case, model), bare(case), "after the offload is taken off")


def check_hooks(case: Case, backend: str) -> None:
    """A hook of the user on the model sees every step once."""
    model = case.build()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with _attach(model, cache={"backend": backend, **NEVER}):
        run(case, model)
    if len(calls) != STEPS:
        raise SideEffect(f"a forward hook of the user ran {len(calls)} times in {STEPS} steps")


# ------------------------------------------------------------------------------------------------ how it is seen


def _hardly(index: int) -> float:
    return 1e-5 * index


def _computed(attached: Any) -> tuple[set[int], int]:
    """The steps that were computed by what the statistics say, and of how many they tell; raises if none was skipped.

    The first steps of a run may be missing from them; these count as computed."""
    denoisers = list(attached.stats().cache.denoisers.values())
    if len(denoisers) != 1:
        raise NotServed("the cache saw no run")
    (stats,) = denoisers
    branches = {name: branch for name, branch in stats.branches.items() if name != UNKNOWN}
    if len(branches) != 1:
        raise NotServed(f"the steps of one branch were taken for {len(branches)}")
    (records,) = (branch.steps for branch in branches.values())
    missing = STEPS - len(records)
    if not 0 <= missing <= 2:
        raise NotServed(f"a run of {STEPS} steps was taken for one of {len(records)}")
    if not stats.skipped:
        why = sorted({record.reason for record in records[1:]})
        raise NotServed(stats.problem or "; ".join(why))
    computed = {missing + index for index, record in enumerate(records) if record.computed}
    return computed | {*range(missing)}, sum(len(branch.steps) for branch in stats.branches.values())


@contextmanager
def _watched() -> Iterator[list[set[int]]]:
    """Which weights are used by the modules that have no others inside; a twin that shares weights counts too."""
    seen: set[int] = set()

    def note(module: torch.nn.Module, _: Any) -> None:
        if not module._modules:
            seen.update(id(weight) for weight in module._parameters.values() if weight is not None)

    handle = register_module_forward_pre_hook(note)
    try:
        yield [seen]
    finally:
        handle.remove()


def _anatomy(model: torch.nn.Module) -> dict[str, tuple[type, frozenset[str]]]:
    """Of every module its class and the names of its attributes."""
    return {name: (type(module), frozenset(module.__dict__)) for name, module in model.named_modules()}


def _unchanged(before: dict[str, tuple[type, frozenset[str]]], after: dict[str, tuple[type, frozenset[str]]]) -> None:
    for name in before.keys() | after.keys():
        if before.get(name, (None,))[0] is not after.get(name, (None,))[0]:
            raise Wrong(f"{name or 'the model'} is of another class than before")
        left = after[name][1] - before[name][1]
        if any("samovar" in attribute for attribute in left) or "forward" in left:
            raise Wrong(f"{name or 'the model'} has kept {sorted(left)}")


# By name: the check, and whether it is made for each backend.
CHECKS: dict[str, tuple[Callable[..., Any], bool]] = {
    "bare": (check_bare, False),
    "exact": (check_exact, True),
    "served": (check_served, True),
    "still": (check_still, True),
    "restored": (check_restored, True),
    "offload": (check_offload, False),
    "hooks": (check_hooks, True),
}
