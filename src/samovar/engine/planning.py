"""Plans by settings alone: how a model would be loaded, and which quantisation to take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    taken: str
    """"exact", or the kind of quantised weights."""
    rungs: tuple[Rung, ...]
    choices: tuple[tuple[str, ...], ...]
    """The rungs as rows of a table."""
    why: str
    """Why that one is taken, and others are not."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found = self.plan.to_dict() | {"host": self.tiers.to_dict()}
        return found | {"choices": [rung.to_dict() for rung in self.rungs], "why": self.why}


def make_plan(
    source: str,
    config: OffloadConfig,
    size: Size,
    *,
    dtype: torch.dtype | str | None = None,
    quantization: QuantizationSetting = None,
    loss: str | None = None,
    bus: str | None = None,
    device: torch.device | None = None,
    attached: AttachConfig | None = None,
) -> MadePlan:
    """The plan for a model's folder, or a class of diffusers, without weights. `device`: choose among what runs there;
    without one it is a plan for any machine, and nothing need be installed here but what reads the file. `attached`:
    what the model will run with."""
    check_loss(loss, quantization, config)
    # Not the bus as measured, which ranks would measure differently: they must choose alike.
    config = replace(config, timing=config.timing or _read_bus(bus))
    parts = read_parts(source, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    if (chosen := Quantization.read(quantization, None)) is not None:
        parts = chosen.applied(parts)
    stored = _stored(source, parts, loss)
    rungs, way = _rungs(source, parts, config, size, [EXACT] if stored else [EXACT, *_kinds(device)], attached)
    if stored:  # It is what it is: there is nothing to choose.
        rungs = [replace(rungs[0], name=stored)]
    taken, why = rungs[0], "" if stored else "nothing is quantised unless --loss or --quantization says so."
    if loss is not None:
        taken, why = _choose(rungs, loss, device)
    if taken.plan is None or taken.tiers is None:
        fitting = ", ".join(rung.name for rung in rungs if rung.plan is not None)
        raise SettingError(taken.problem + f" Or quantise: {fitting} would fit." * bool(fitting), param="gpu_memory")
    notes = () if way == Way() else (f"{way.chosen}, since gpu_memory is not enough otherwise",)
    plan = replace(taken.plan, notes=(*taken.plan.notes, *notes))
    return MadePlan(plan, taken.tiers, taken.name, tuple(rungs), tuple(table_of(rungs, _marks(taken.name))), why)


def _stored(source: str, parts: Parts, loss: str | None) -> str:
    """How the denoisers are quantised already; empty if they are not. Refused if a kind should be chosen."""
    kinds = {name: part.kind for name, part in parts.items() if part.role == "denoiser" and part.kind}
    if kinds and loss is not None:
        found = ", ".join(f"{name} as {kind}" for name, kind in kinds.items())
        raise ModelError(f"{source} is quantised already: {found}. Leave out loss.")
    return ", ".join(dict.fromkeys(kinds.values()))


def _marks(taken: str) -> dict[str, str]:
    """What the table says beside a choice: that it is taken, or what is missing here."""
    packages = {name: QUANTISERS[kind.package] for name, kind in KINDS.items()}
    return {name: f"needs {each.requirement}" for name, each in packages.items() if each.problem()} | {taken: "taken"}


def _kinds(device: torch.device | None) -> list[str]:
    """The kinds that run on a device; all of them without one."""
    return [name for name in KINDS if device is None or not _problem(name, device)]


def _choose(rungs: Sequence[Rung], loss: str, device: torch.device | None) -> tuple[Rung, str]:
    """The rung to take, and why, and why not others."""
    allowed = [kind.name for kind in kinds_within(loss)]
    taken, why = choose_rung([rung for rung in rungs if rung.name in (EXACT, *allowed)])
    problems = [_problem(name, device) for name in allowed if device is not None]
    return taken, " ".join([f"{why}.", *filter(None, problems)])


def _problem(name: str, device: torch.device) -> str:
    """Why a kind does not run on a device; empty if it does."""
    try:
        check_kind(name, device)
    except SettingError as error:
        return str(error)
    return ""


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
    attached: AttachConfig | None,
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
