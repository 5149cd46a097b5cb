"""What is attached where, in which order, and why? Read off the pipeline itself, not off what was wished for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..arch import ModuleDiscovery, coverage, find_anatomy, find_denoisers
from ..arch.modules import named_parts, unwrapped
from ..cache import CacheBackend, TeaCacheBackend
from ..hooks import HookOrder, HookRegistry, pipeline_hooks
from ..offload import Offloaded
from ..other_libraries import compiled_call
from ..parallel import SequenceParallelConfig
from .config import AttachConfig, skipped_share
from .peers import Peer
from .regional import Regions

_WHY = {
    HookOrder.OUTERMOST: "tells whose call this is, for all that stand inside",
    HookOrder.SHARD: "splits the work over ranks, outside the cache, so that ranks decide as one",
    HookOrder.CACHE: "may answer for what stands inside, so that a skipped block moves no weights and runs no graph",
    HookOrder.OFFLOAD: "brings weights in for what is really computed, and nothing else",
    HookOrder.OTHER: "stands next to the module itself",
}


@dataclass(frozen=True)
class Feature:
    """One thing that is attached."""

    name: str
    settings: str
    why: str


@dataclass(frozen=True)
class Place:
    """Modules that have the same on them."""

    where: tuple[str, ...]
    """Paths; a star stands for the numbers of a list."""
    num_modules: int
    chain: tuple[str, ...]
    """Outermost first."""


@dataclass(frozen=True)
class Explanation:
    """What `Attached.explain` gives; `str` of it is for people."""

    pipeline: str
    features: tuple[Feature, ...]
    pipeline_hooks: tuple[str, ...]
    """What watches where a run begins and ends."""
    places: tuple[Place, ...]
    order: tuple[str, ...]
    """Why hooks stand in the order in which they do, outermost first; those kinds that are there."""
    crossings: tuple[str, ...]
    """What one feature is told of another."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.features:
            return f"{self.pipeline}: nothing is attached."
        lines = [f"{self.pipeline}:"]
        for feature in self.features:
            head, *rest = feature.settings.splitlines()
            lines += [f"  {feature.name}: {head}", *(f"    {line}" for line in rest if line), f"    {feature.why}"]
        if self.pipeline_hooks:
            lines += ["", f"Around a run: {', '.join(self.pipeline_hooks)}"]
        lines += ["", "Around a call, outermost first:"] if self.places else []
        for place in self.places:
            lines += [f"  {' > '.join(place.chain)}", *(f"    {line}" for line in _wrapped(place))]
        lines += ["", *(f"  {line}" for line in self.order)] if self.order else []
        if self.crossings:
            lines += ["", "Told to each other:", *(f"  - {crossing}" for crossing in self.crossings)]
        return "\n".join(lines)


def explain(
    pipe: Any,
    config: AttachConfig,
    *,
    cache: CacheBackend | None,
    offloaded: Offloaded | None,
    regions: Regions,
    peers: Sequence[Peer],
    sharding: Mapping[str, str],
) -> Explanation:
    """What is on a pipeline now."""
    bare = unwrapped(pipe) if isinstance(pipe, torch.nn.Module) else pipe
    places = _places(pipe)
    hooks = {hook for place in places for hook in place.chain}
    seen = [order for order in HookOrder if any(hook.endswith(f"({order.name.lower()})") for hook in hooks)]
    found = _features(
        config,
        cache,
        offloaded,
        regions,
        sharding,
        covered=_covered(pipe) if isinstance(cache, TeaCacheBackend) else (),
    )
    features = (*found, *(_of_peer(peer) for peer in peers))
    return Explanation(
        pipeline=type(bare).__name__,
        features=features,
        pipeline_hooks=tuple(pipeline_hooks(pipe)),
        places=places,
        order=tuple(f"{order.name.lower()}: {_WHY[order]}" for order in seen),
        crossings=tuple(_crossings(config, cache, offloaded, regions)),
    )


# ------------------------------------------------------------------------------------------------ what


def _features(
    config: AttachConfig,
    cache: CacheBackend | None,
    offloaded: Offloaded | None,
    regions: Regions,
    sharding: Mapping[str, str],
    *,
    covered: Sequence[str],
) -> Iterator[Feature]:
    wish = config.parallel or SequenceParallelConfig()
    if wish.sequence_parallel_size > 1:
        sources = [f"{name}: split by the plan {source}" for name, source in sharding.items() if source]
        unknown = "the plan is compared with the unsharded output at the first forward"
        settings = f"{wish.sequence_parallel_size} ranks, {wish.strategy}"
        yield Feature("sequence parallel", settings, "; ".join(sources) or unknown)
    if config.cfg_parallel > 1:
        why = "each computes its own branches; the first step, on all ranks, shows how many there are"
        yield Feature("CFG parallel", f"{config.cfg_parallel} ranks", why)
    if cache is not None:
        about = cache.config.summary() if isinstance(cache, TeaCacheBackend) else ""
        name = type(cache).__name__.removesuffix("Backend")
        settings = "\n".join((f"{name} {about}".strip(), *covered))
        yield Feature("cache", settings, "skips steps that would change little")
    if regions:
        classes = sorted({type(block).__name__ for block in regions.values()})
        compiler = "torch's usual compiler" if config.compile is True else f"{config.compile}"
        why = "blocks of a class share a graph; all hooks stand outside of it"
        yield Feature("compile", f"{len(regions)} blocks ({', '.join(classes)}) by {compiler}", why)
    if offloaded is not None:
        settings = f"{offloaded.config.mode}, computing on {offloaded.execution_device}\n{offloaded.plan}"
        yield Feature("offload", settings, "what is not needed yet does not lie on the device")


def _covered(pipe: Any) -> tuple[str, ...]:
    """For each denoiser that is built of blocks, how much of it they hold: the rest runs at skipped steps, too."""
    found = {name: (module, find_anatomy(module)) for name, module in find_denoisers(pipe).items()}
    return tuple(f"{name}: {coverage(module, anatomy)}" for name, (module, anatomy) in found.items() if anatomy.stacks)


def _of_peer(peer: Peer) -> Feature:
    return Feature(peer.name, f"on {peer.where}", "was there before, and stays: it works inside of ours")


def _crossings(
    config: AttachConfig, cache: CacheBackend | None, offloaded: Offloaded | None, regions: Regions
) -> Iterator[str]:
    if cache is not None and config.num_ranks > 1:
        yield f"the cache decides by figures of all {config.num_ranks} ranks, so that all skip the same steps"
    if cache is not None and offloaded is not None:
        share = skipped_share(cache)
        known = "is not known before a run, and taken as 0" if share is None else f"is {share:.0%}"
        yield f"the planner of the offload is told what share of the forwards is skipped, which {known}"
        yield "the cache keeps its own copies of the few weights it decides by, where their block is offloaded"
    if offloaded is not None:
        yield f"the pipeline makes its latents on {offloaded.execution_device}, wherever its weights lie"
    if regions and config.num_ranks > 1:
        yield "graphs of blocks break at each attention, where ranks exchange what they have"


# ------------------------------------------------------------------------------------------------ where


def _places(pipe: Any) -> tuple[Place, ...]:
    """All modules that have something on them, those with the same chain together, in the order of their paths."""
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for path, module in _modules(pipe):
        chain = _chain(module)
        if chain:
            paths = found.setdefault(chain, {})
            starred = re.sub(r"\.\d+(?=\.|$)", ".*", path)
            paths[starred] = paths.get(starred, 0) + 1
    return tuple(Place(tuple(paths), sum(paths.values()), chain) for chain, paths in found.items())


def _chain(module: torch.nn.Module) -> tuple[str, ...]:
    hooks = [f"{name} ({order.name.lower()})" for name, order in HookRegistry.get_or_create(module).chain]
    return (*hooks, "compiled") if compiled_call(module) is not None else tuple(hooks)


def _modules(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(pipe, torch.nn.Module):
        roots = {type(unwrapped(pipe)).__name__: pipe}
    else:
        roles = ModuleDiscovery.discover(pipe).roles().values()
        roots = {name: module for names, modules in roles for name, module in zip(names, modules, strict=True)}
    for name, root in roots.items():
        for path, module in named_parts(root).items():
            yield f"{name}.{path}".rstrip("."), module


def _wrapped(place: Place, width: int = 112) -> list[str]:
    """The paths in lines of some width."""
    lines = [""]
    for path in place.where:
        word = f"{path}, "
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word
    lines[-1] = lines[-1].removesuffix(", ")
    count = f" ({place.num_modules} modules)" if place.num_modules > 1 else ""
    return [line.rstrip() for line in lines[:-1]] + [lines[-1] + count]
