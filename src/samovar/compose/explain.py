"""What is attached where, in which order, and why: read from the pipeline itself, not from the settings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..arch import ModuleDiscovery, coverage, find_anatomy
from ..arch.modules import named_parts, unwrapped
from ..arch.skeleton import loaded_parts
from ..cache import AutoConfig, CacheBackend, TeaCacheBackend
from ..core.interop import compiled_call
from ..core.quantisers import quantised_as
from ..hooks import HookOrder, HookRegistry, pipeline_hooks
from .config import skipped_share

if TYPE_CHECKING:
    from ..offload import Offloaded
    from .attached import Attached

_QUANTIZATION = "quantization"
_LITTLE = "skips steps that would change little"
_FITS = "the budget holds everything"
_WHY = {
    HookOrder.OUTERMOST: "identifies the branch of the call for the hooks inside",
    HookOrder.SHARD: "splits the work over ranks; it is outside the cache, so that all ranks decide alike",
    HookOrder.CACHE: "may answer for everything inside: a skipped block moves no weights and runs no graph",
    HookOrder.MEETING: "computes the calls of several requests at once: what is inside runs once for all of them",
    HookOrder.OFFLOAD: "brings in the weights of what is really computed, and nothing else",
    HookOrder.OTHER: "is next to the module itself",
}


@dataclass(frozen=True)
class Feature:
    """One feature on the pipeline."""

    name: str
    settings: str
    why: str


@dataclass(frozen=True)
class Place:
    """Modules with the same chain of hooks."""

    where: tuple[str, ...]
    """Paths; a star stands for the indices of a list."""
    num_modules: int
    chain: tuple[str, ...]
    """Outermost first."""

    def lines(self) -> list[str]:
        """The paths, wrapped, and the number of modules."""
        count = f" ({self.num_modules} modules)" if self.num_modules > 1 else ""
        return textwrap.wrap(", ".join(self.where) + count, 112, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Explanation:
    """The result of `Attached.explain`. Print it."""

    pipeline: str
    features: tuple[Feature, ...]
    pipeline_hooks: tuple[str, ...]
    """Hooks that see where a run begins and ends."""
    places: tuple[Place, ...]
    order: tuple[str, ...]
    """Why the hooks are in this order, outermost first; only the kinds that are there."""
    interactions: tuple[str, ...]
    """What one feature knows about another."""

    def because(self, why: str) -> Explanation:
        """The same with the reason why weights are quantised, or are not."""
        others = tuple(feature for feature in self.features if feature.name != _QUANTIZATION)
        quantised = next((f.settings for f in self.features if f.name == _QUANTIZATION), "none")
        return replace(self, features=(Feature(_QUANTIZATION, quantised, why), *others)) if why else self

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
            lines += ["", f"Hooks around a run: {', '.join(self.pipeline_hooks)}"]
        lines += ["", "Hooks around a call, outermost first:"] if self.places else []
        for place in self.places:
            lines += [f"  {' > '.join(place.chain)}", *(f"    {line}" for line in place.lines())]
        lines += ["", *(f"  {line}" for line in self.order)] if self.order else []
        if self.interactions:
            lines += ["", "Good to know:", *(f"  - {line}" for line in self.interactions)]
        return "\n".join(lines)

    __repr__ = __str__


def explain(attached: Attached) -> Explanation:
    """What is on the pipeline now."""
    pipe = attached.pipe
    name = type(unwrapped(pipe) if isinstance(pipe, torch.nn.Module) else pipe).__name__
    if attached.is_detached:
        return Explanation(name, (), (), (), (), ())
    places = _places(pipe)
    hooks = {hook for place in places for hook in place.chain}
    seen = [order for order in HookOrder if any(hook.endswith(f"({order.name.lower()})") for hook in hooks)]
    return Explanation(
        pipeline=name,
        features=tuple(_features(attached)),
        pipeline_hooks=tuple(pipeline_hooks(pipe)),
        places=places,
        order=tuple(f"{order.name.lower()}: {_WHY[order]}" for order in seen),
        interactions=tuple(_interactions(attached)),
    )


def _features(attached: Attached) -> Iterator[Feature]:
    """What is there, outermost first: what was quantised, whoever did it; ours; and what others have attached."""
    kinds = {name: quantised_as(part.module) for name, part in loaded_parts(attached.pipe).items() if part.module}
    found = ", ".join(f"{name} as {kind}" for name, kind in kinds.items() if kind)
    if found:
        yield Feature(_QUANTIZATION, found, "weights were quantised when they were loaded")
    yield from _parallel(attached)
    if attached.cache is not None:
        yield _cache(attached.cache, attached.denoisers)
    yield from _compiled(attached)
    if attached.offloaded is not None:
        yield _offload(attached.offloaded)
    for peer in attached.peers:
        yield Feature(peer.name, f"on {peer.where}", "was there before and stays: it works inside our hooks")


def _parallel(attached: Attached) -> Iterator[Feature]:
    parallel = attached.config.parallel
    if parallel.sequence_parallel_size > 1:
        sources = [f"{name}: split by the plan {source}" for name, source in attached.stats().sharding.items()]
        unknown = "the plan is compared with the unsharded output at the first forward"
        settings = f"{parallel.sequence_parallel_size} ranks, {parallel.strategy}"
        yield Feature("sequence parallel", settings, "; ".join(sources) or unknown)
    if parallel.cfg_parallel_size > 1:
        why = "each rank computes its own branches; the first step runs on all ranks to count them"
        yield Feature("CFG parallel", f"{parallel.cfg_parallel_size} ranks", why)


def _compiled(attached: Attached) -> Iterator[Feature]:
    """What computes a forward, a decode or an attention in another way."""
    config = attached.config
    if attached.regions:
        classes = ", ".join(sorted({type(block).__name__ for block in attached.regions.values()}))
        compiler = config.compiler or "torch's default compiler"
        settings = f"{len(attached.regions)} blocks ({classes}) by {compiler}"
        yield Feature("compile", settings, "blocks of a class share a graph; all hooks are outside it")
    if attached.vaes:
        ways = [name for name in attached.features if name.startswith("vae_")]
        by_plan = " and ".join(name for name in ways if getattr(config, name) is None)
        why = f"gpu_memory is not enough without {by_plan}" if by_plan else "as the settings say"
        names = ", ".join(type(vae).__name__ for vae in attached.vaes)
        yield Feature("VAE", f"{', '.join(ways)}: {names}", why)
    if attached.attention:
        states = (f"{name}: {hook.state}" for name, hook in attached.attention.items())
        yield Feature("attention", "\n".join((str(config.attention), *states)), "other kernels for the same attention")
    if config.graphs is not None:
        lines = (f"{name}: {hook.stats()}" for name, hook in attached.graphs.items())
        why = "computed forwards are replayed as CUDA graphs, with the bits of the model; skipped steps stay outside"
        yield Feature("graphs", "\n".join((f"at most {config.graphs.max_graphs} of each denoiser", *lines)), why)


def _offload(offloaded: Offloaded) -> Feature:
    done, plan = offloaded.stats().ahead, offloaded.plan
    lines: list[Any] = [f"{offloaded.config.mode}, computing on {offloaded.execution_device}", plan]
    lines += [offloaded.tiers] * plan.offloads_anything
    lines += [f"{name}: {done[name]}" for name in offloaded.time_layers if name in done]
    lines += [f"{name}: not computed ahead: {why}" for name, why in offloaded.not_ahead.items() if why]
    why = "weights are on the device only when they are needed"
    return Feature("offload", "\n".join(map(str, lines)), why if plan.offloads_anything else _FITS)


def _cache(cache: CacheBackend, denoisers: dict[str, torch.nn.Module]) -> Feature:
    if not isinstance(cache, TeaCacheBackend):
        return Feature("cache", type(cache).__name__.removesuffix("Backend"), _LITTLE)
    if isinstance(cache.config, AutoConfig):
        why = "leaves out whole forwards, as many as the error of its last forecast allows"
        return Feature("cache", f"auto {cache.config.summary()}", why)
    # The rest of a denoiser that is made of blocks also runs at skipped steps.
    anatomies = ((name, module, find_anatomy(module)) for name, module in denoisers.items())
    covered = (f"{name}: {coverage(module, anatomy)}" for name, module, anatomy in anatomies if anatomy.stacks)
    why = "skips the steps of its schedule" if cache.config.schedule is not None else _LITTLE
    return Feature("cache", "\n".join((f"TeaCache {cache.config.summary()}", *covered)), why)


def _interactions(attached: Attached) -> Iterator[str]:
    config, offloaded = attached.config, attached.offloaded
    if config.cache is not None and config.num_ranks > 1:
        yield f"the cache decides from the figures of all {config.num_ranks} ranks, so all ranks skip the same steps"
    if config.cache is not None and offloaded is not None:
        share = skipped_share(config.cache)
        skips = "no forwards, as their number is not known yet" if share is None else f"{share:.0%} of the forwards"
        yield f"the offload planner assumes that the cache skips {skips}"
        if not isinstance(config.cache.settings, AutoConfig):
            yield "the cache has its own copies of the few weights that it needs to decide, if their block is offloaded"
    if offloaded is not None and not isinstance(attached.pipe, torch.nn.Module):
        yield f"the pipeline creates its latents on {offloaded.execution_device}, wherever its weights are"
    if attached.regions and config.num_ranks > 1:
        yield "the graphs of blocks break at each attention, where ranks exchange tokens"


def _places(pipe: Any) -> tuple[Place, ...]:
    """All modules with hooks, grouped by their chain."""
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
