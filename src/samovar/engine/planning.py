"""Plans by settings alone: how a model would be loaded, and which quantisation to take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..arch.quantised import KINDS, kinds_within
from ..arch.skeleton import Parts
from ..compose import AttachConfig
from ..compose.vae import Way, divide_vaes
from ..core.errors import ModelError, SettingError
from ..core.quantisers import QUANTISERS
from ..core.settings import parse_bytes
from ..offload import OffloadConfig, OffloadPlan, TierPlan, Timing, read_parts
from ..offload.quantization_choice import EXACT, Ladder, Rung, choose_rung, table_of
from ..offload.ring import ASSUMED_BUS
from ..trace.activations import read_activations
from ..trace.dry_run import RequestSize
from .quantize import Quantization, QuantizationSetting, check_kind

Size = Mapping[str, int | None]


@dataclass(frozen=True)
class MadePlan:
    """A plan, and the choices beside it."""

    plan: OffloadPlan
    tiers: TierPlan
    rungs: tuple[Rung, ...] = ()
    choices: tuple[tuple[str, ...], ...] = ()
    """The rungs as rows of a table."""
    why: str = ""
    """Which rung is taken, and why."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found = self.plan.to_dict() | {"host": self.tiers.to_dict()}
        return found | {"choices": [rung.to_dict() for rung in self.rungs], "why": self.why}


def make_plan(
    source: str,
    config: OffloadConfig,
    size: Size,
    *,
    dtype: str | None = None,
    quantization: QuantizationSetting = None,
    loss: str | None = None,
    bus: str | None = None,
) -> MadePlan:
    """The plan for a model's folder, a class of diffusers, without weights."""
    check_loss(loss, quantization, config)
    config = replace(config, timing=config.timing or _read_bus(bus))
    parts = read_parts(source, getattr(torch, dtype) if dtype else None)
    # A plan is for any machine, so nothing need be installed here but what reads the file.
    chosen = Quantization.read(quantization, None)
    if loss is not None:
        _refuse_quantised(source, parts)
    parts = parts if chosen is None else chosen.applied(parts)
    stored = ", ".join(dict.fromkeys(part.kind for part in parts.values() if part.role == "denoiser" and part.kind))
    rungs, way = _rungs(source, parts, config, size, [EXACT] if stored else [EXACT, *KINDS])
    if stored:  # It is what it is: there is nothing to choose.
        rungs = [replace(rungs[0], name=stored)]
        made = replace(_choose(rungs, None), choices=tuple(table_of(rungs, {})), why="")
    else:
        made = _choose(rungs, loss)
    if way == Way():
        return made
    notes = (*made.plan.notes, f"{way.chosen}, since gpu_memory is not enough otherwise")
    return replace(made, plan=replace(made.plan, notes=notes))


def _choose(rungs: Sequence[Rung], loss: str | None) -> MadePlan:
    """The plan of the choice to take, and the others beside it."""
    if loss is None:
        taken, why = rungs[0], "Nothing is quantised unless --loss or --quantization says so"
    else:
        allowed = {EXACT, *(kind.name for kind in kinds_within(loss))}
        taken, why = choose_rung([rung for rung in rungs if rung.name in allowed])
    if taken.plan is None or taken.tiers is None:
        fitting = ", ".join(rung.name for rung in rungs if rung.plan is not None)
        raise SettingError(taken.problem + f" Or quantise: {fitting} would fit." * bool(fitting), param="gpu_memory")
    packages = {name: QUANTISERS[kind.package] for name, kind in KINDS.items()}
    notes = {name: f"needs {package.requirement}" for name, package in packages.items() if package.problem()}
    choices = tuple(table_of(rungs, notes | {taken.name: "taken"}))
    return MadePlan(taken.plan, taken.tiers, tuple(rungs), choices, f"{why[0].upper()}{why[1:]}.")


def _read_bus(bus: str | None) -> Timing:
    speed = ASSUMED_BUS if bus is None else parse_bytes(bus, "bus")
    if not speed:
        raise SettingError(f"bus={bus!r}; expected bytes per second, more than 0, such as '25GiB'.", param="bus")
    return Timing(speed)


def _rungs(
    source: str,
    parts: Parts,
    config: OffloadConfig,
    size: Size,
    names: Iterable[str],
    attached: AttachConfig | None = None,
) -> tuple[list[Rung], Way]:
    """What each choice would take, with VAEs that decode in the first way for which the budget is enough, as in
    `attach`."""
    vaes = [part.module for part in parts.values() if part.role == "vae" and part.module is not None]
    may = (None, None) if attached is None else (attached.vae_tiling, attached.vae_slicing)
    way, found = Way(*map(bool, may)), list[tuple[list[Rung], Way]]()
    for each in way.smaller(vaes, *may):
        with divide_vaes(vaes, each):
            seen = read_activations(source, parts, RequestSize(**size))
        ladder = Ladder(parts, seen, config)
        rungs = [ladder.rung(name) for name in names if name == EXACT or ladder.changes(KINDS[name])]
        found.append((rungs, each))
        if any(rung.plan is not None for rung in rungs):
            return found[-1]
    return found[0]


def check_loss(loss: str | None, quantization: QuantizationSetting, config: OffloadConfig | None) -> None:
    """Refuse a level that is unknown, that contradicts a quantisation, or that has no budget to choose by."""
    if loss is None:
        return
    kinds_within(loss)
    if quantization is not None and quantization != "none":
        raise SettingError(
            f"loss={loss!r} lets the planner choose, and quantization={quantization!r} is a choice. Give one of them.",
            param="loss",
        )
    if loss != EXACT and (config is None or config.gpu_memory is None):
        raise SettingError(
            f"loss={loss!r} lets the planner quantise to fit a budget, and there is none. Give gpu_memory, such as "
            "'12GiB', or say which with quantization.",
            param="loss",
        )


def choose_quantization(
    folder: Path, dtype: torch.dtype, device: torch.device, attached: AttachConfig, size: Size, loss: str
) -> tuple[Quantization | None, str]:
    """Of what may be lost, the quantisation that fits and sends the fewest bytes over the bus, and why.

    `attached`: what the model will run with.
    """
    config = attached.offload
    assert config is not None, "there is no budget without offload"
    parts = read_parts(str(folder), dtype)
    _refuse_quantised(str(folder), parts)
    config = replace(config, timing=config.timing or Timing(ASSUMED_BUS))  # Ranks must choose alike.
    names, left = [EXACT], list[str]()
    for kind in kinds_within(loss):
        try:
            names.append(check_kind(kind.name, device).name)
        except SettingError as error:
            left.append(str(error))
    rungs, _ = _rungs(str(folder), parts, config, size, names, attached)
    taken, why = choose_rung(rungs)
    return None if taken.name == EXACT else Quantization.read(taken.name, device), " ".join([f"{why}.", *left])


def _refuse_quantised(source: str, parts: Parts) -> None:
    """Refuse to choose for denoisers that are quantised already."""
    kinds = [f"{name} as {part.kind}" for name, part in parts.items() if part.role == "denoiser" and part.kind]
    if kinds:
        raise ModelError(f"{source} is quantised already: {', '.join(kinds)}. Leave out loss.")
