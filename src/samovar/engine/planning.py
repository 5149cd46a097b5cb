"""Plans by settings alone: how a model would be loaded, and which quantisation to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..arch.gguf_file import read_gguf
from ..arch.quantised import KINDS, Kind, kinds_within
from ..arch.skeleton import Parts
from ..compose import AttachConfig
from ..compose.vae import Way, divide_vaes
from ..core.errors import ModelError, SettingError
from ..core.quantisers import QUANTISERS
from ..core.settings import parse_bytes
from ..offload import OffloadConfig, OffloadPlan, TierPlan, Timing, plan_offload, plan_tiers, read_parts, uses_of
from ..offload.quantization_choice import EXACT, Ladder, Rung, choose_rung, table_of
from ..offload.ring import ASSUMED_BUS
from ..offload.sizes import sizes_in
from ..trace.activations import Activations, read_activations
from ..trace.dry_run import RequestSize
from .quantize import GGUF, Quantization, QuantizationSetting, check_kind

Planned = TypeVar("Planned")


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
    size: Mapping[str, int],
    *,
    dtype: str | None = None,
    quantization: QuantizationSetting = None,
    loss: str | None = None,
    bus: str | None = None,
) -> MadePlan:
    """The plan for a model's folder, a class of diffusers or a GGUF file, without weights."""
    check_loss(loss, quantization, config)
    speed = ASSUMED_BUS if bus is None else parse_bytes(bus, "bus")
    if not speed:
        raise SettingError(f"bus={bus!r}; expected bytes per second, more than 0, such as '25GiB'.", param="bus")
    config = replace(config, timing=config.timing or Timing(speed))
    if source.endswith(GGUF) and Path(source).expanduser().is_file():
        return _plan_file(source, config, quantization or loss)
    parts = read_parts(source, getattr(torch, dtype) if dtype else None)

    def made(seen: Activations) -> MadePlan:
        return _made(source, parts, seen, config, quantization, loss)

    found, way = _in_the_first_way(source, parts, RequestSize(**size), Way(), (None, None), made)
    if way == Way():
        return found
    notes = (*found.plan.notes, f"{way.chosen}, since gpu_memory is not enough otherwise")
    return replace(found, plan=replace(found.plan, notes=notes))


def _in_the_first_way(
    source: str,
    parts: Parts,
    size: RequestSize,
    way: Way,
    may: tuple[bool | None, bool | None],
    plan: Callable[[Activations], Planned],
) -> tuple[Planned, Way]:
    """A plan, with VAEs that decode in the first way for which the budget is enough, as in `attach`. `may`: whether
    they may decode in tiles, and one image after the other."""
    vaes = [part.module for part in parts.values() if part.role == "vae" and part.module is not None]
    refused: list[SettingError] = []
    for each in way.smaller(*may) if vaes else (way,):
        try:
            with divide_vaes(vaes, each):
                seen = read_activations(source, parts, size)
            return plan(seen), each
        except SettingError as error:
            refused.append(error)
            if error.param not in ("gpu_memory", "vae_tiling", "vae_slicing"):
                raise
    raise refused[0]


def _made(
    source: str,
    parts: Parts,
    seen: Activations,
    config: OffloadConfig,
    quantization: QuantizationSetting,
    loss: str | None,
) -> MadePlan:
    # A plan is for any machine, so nothing need be installed here but what reads the file.
    chosen = Quantization.read(quantization, None)
    if loss is not None:
        _refuse_quantised(source, parts)
    parts = parts if chosen is None else chosen.applied(parts)
    ladder = Ladder(parts, seen, config)
    kinds = dict.fromkeys(part.kind for part in parts.values() if part.role == "denoiser" and part.kind)
    if not kinds:
        return _with_choices(ladder, loss)
    rung = replace(ladder.rung(EXACT), name=", ".join(kinds))
    return MadePlan(*_planned(rung), (rung,), tuple(table_of([rung], {})))


def _with_choices(ladder: Ladder, loss: str | None) -> MadePlan:
    rungs = [ladder.rung(name) for name in (EXACT, *(name for name, kind in KINDS.items() if ladder.changes(kind)))]
    needs = {name: QUANTISERS[kind.package] for name, kind in KINDS.items()}
    notes = {name: f"needs {package.requirement}" for name, package in needs.items() if package.problem()}
    if loss is None:
        taken, why = rungs[0], "Nothing is quantised unless --loss or --quantization says so"
        fitting = [rung.name for rung in rungs if rung.plan is not None]
        if taken.plan is None and fitting:
            raise SettingError(f"{taken.problem} Or quantise: {', '.join(fitting)} would fit.", param="gpu_memory")
    else:
        allowed = {EXACT, *(kind.name for kind in kinds_within(loss))}
        taken, why = choose_rung([rung for rung in rungs if rung.name in allowed])
    notes[taken.name] = "taken"
    return MadePlan(*_planned(taken), tuple(rungs), tuple(table_of(rungs, notes)), f"{why[0].upper()}{why[1:]}.")


def _planned(rung: Rung) -> tuple[OffloadPlan, TierPlan]:
    if rung.plan is None:
        raise SettingError(rung.problem, param="gpu_memory")
    assert rung.tiers is not None, "a plan has tiers"
    return rung.plan, rung.tiers


def _plan_file(source: str, config: OffloadConfig, quantises: Any) -> MadePlan:
    """The plan for the weights in a GGUF file, of which nothing else is known."""
    if quantises:
        raise SettingError(f"{source!r} is quantised already. Leave out quantization and loss.", param="quantization")
    if config.exclude:
        message = f"{source!r} holds one component, which would be left out. Leave out exclude."
        raise SettingError(message, param="exclude")
    sizes = sizes_in(read_gguf(source))
    plan = plan_offload(sizes, config)
    return MadePlan(plan, plan_tiers(uses_of(sizes, plan), parse_bytes(config.host_memory, "host_memory")))


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
    if loss != "exact" and (config is None or config.gpu_memory is None):
        raise SettingError(
            f"loss={loss!r} lets the planner quantise to fit a budget, and there is none. Give gpu_memory, such as "
            "'12GiB', or say which with quantization.",
            param="loss",
        )


def choose_quantization(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    attached: AttachConfig,
    size: Mapping[str, int | None],
    loss: str,
) -> tuple[Quantization | None, str]:
    """Of what may be lost, the quantisation that fits and sends the fewest bytes over the bus, and why.

    `attached`: what the model will run with.
    """
    config = attached.offload
    assert config is not None, "there is no budget without offload"
    parts = read_parts(str(folder), dtype)
    _refuse_quantised(str(folder), parts)
    config = replace(config, timing=config.timing or Timing(ASSUMED_BUS))  # Ranks must choose alike.
    left: list[str] = []
    kinds: list[Kind] = []
    for kind in kinds_within(loss):
        try:
            kinds.append(check_kind(kind.name, device))
        except SettingError as error:
            left.append(str(error))

    def chosen(seen: Activations) -> tuple[Rung, str]:
        ladder = Ladder(parts, seen, config)
        return choose_rung(
            [ladder.rung(name) for name in (EXACT, *(kind.name for kind in kinds if ladder.changes(kind)))]
        )

    way, may = Way(bool(attached.vae_tiling), bool(attached.vae_slicing)), (attached.vae_tiling, attached.vae_slicing)
    (taken, why), _ = _in_the_first_way(str(folder), parts, RequestSize(**size), way, may, chosen)
    why = " ".join([f"{why}.", *left])
    return None if taken.name == EXACT else Quantization.read(taken.name, device), why


def _refuse_quantised(source: str, parts: Parts) -> None:
    """Refuse to choose for denoisers that are quantised already."""
    kinds = [f"{name} as {part.kind}" for name, part in parts.items() if part.role == "denoiser" and part.kind]
    if kinds:
        raise ModelError(f"{source} is quantised already: {', '.join(kinds)}. Leave out loss.")
