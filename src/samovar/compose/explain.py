"""What is attached where, in which order, and why: read from the pipeline itself, not from the settings."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..arch import coverage, find_anatomy
from ..arch.modules import named_parts, unwrapped
from ..arch.skeleton import loaded_parts
from ..cache import AutoConfig, TeaCacheBackend
from ..core.interop import compiled_call
from ..core.quantisers import quantised_as
from ..hooks import HookOrder, HookRegistry, pipeline_hooks

if TYPE_CHECKING:
    from .attached import Attached

_QUANTIZATION = "quantization"
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

    def __str__(self) -> str:
        return f"{self.name}: " + "\n  ".join((*filter(None, self.settings.splitlines()), self.why))


@dataclass(frozen=True)
class Place:
    """Modules with the same chain of hooks."""

    where: tuple[str, ...]
    """Paths; a star stands for the indices of a list."""
    num_modules: int
    chain: tuple[str, ...]
    """Outermost first."""

    def __str__(self) -> str:
        where = ", ".join(self.where) + f" ({self.num_modules} modules)" * (self.num_modules > 1)
        paths = textwrap.wrap(where, 112, break_long_words=False, break_on_hyphens=False)
        return "\n  ".join((" > ".join(self.chain), *paths))


@dataclass(frozen=True)
class Explanation:
    """The result of `Attached.explain`. Print it."""

    pipeline: str
    features: tuple[Feature, ...] = ()
    places: tuple[Place, ...] = ()
    order: tuple[str, ...] = ()
    """Why the hooks are in this order, outermost first; only the kinds that are there."""

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
        parts = {
            f"{self.pipeline}:": self.features,
            "Hooks, outermost first:": (*self.places, *self.order),
        }
        texts = {title: textwrap.indent("\n".join(map(str, part)), "  ") for title, part in parts.items() if part}
        return "\n\n".join(f"{title}\n{text}" for title, text in texts.items())

    __repr__ = __str__


def explain(attached: Attached) -> Explanation:
    """What is on the pipeline now."""
    pipe = attached.pipe
    name = type(unwrapped(pipe) if isinstance(pipe, torch.nn.Module) else pipe).__name__
    features = () if attached.is_detached else tuple(_features(attached))
    if not features:
        return Explanation(name)
    places, kinds = _places(pipe)
    order = (f"{kind.name.lower()}: {_WHY[kind]}" for kind in HookOrder if kind in kinds)
    return Explanation(name, features, places, tuple(order))


def _features(attached: Attached) -> Iterator[Feature]:
    """What was quantised, whoever did it; then ours, outermost first; then what others have attached."""
    config, parallel = attached.config, attached.config.parallel
    kinds = {name: quantised_as(part.module) for name, part in loaded_parts(attached.pipe).items() if part.module}
    if quantised := ", ".join(f"{name} as {kind}" for name, kind in kinds.items() if kind):
        yield Feature(_QUANTIZATION, quantised, "weights were quantised when they were loaded")
    if parallel.sequence_parallel_size > 1:
        sources = [f"{name}: split by the plan {source}" for name, source in attached.stats().sharding.items()]
        why = "; ".join(sources) or "the plan is compared with the unsharded output at the first forward"
        yield Feature("sequence parallel", f"{parallel.sequence_parallel_size} ranks, {parallel.strategy}", why)
    if parallel.cfg_parallel_size > 1:
        why = "each rank computes its own branches; the first step runs on all ranks to count them"
        yield Feature("CFG parallel", f"{parallel.cfg_parallel_size} ranks", why)
    if config.cache is not None:
        yield _cache(attached)
    yield from _computed_otherwise(attached)
    if attached.offloaded is not None:
        yield _offload(attached)
    for peer in attached.peers:
        yield Feature(peer.name, f"on {peer.where}", "pre-existing, and compatible: it works inside our hooks")


def _computed_otherwise(attached: Attached) -> Iterator[Feature]:
    """What computes a forward, a decode or an attention in another way."""
    config = attached.config
    if attached.regions:
        classes = ", ".join(sorted({type(block).__name__ for block in attached.regions.values()}))
        compiler = "torch's default compiler" if config.compiler is True else config.compiler
        settings = f"{len(attached.regions)} blocks ({classes}) by {compiler}"
        yield Feature("compile", settings, "blocks of a class share a graph; all hooks are outside it")
    if attached.vaes:
        yield _vae(attached)
    if config.attention is not None:
        states = (f"{name}: {hook.state}" for name, hook in attached.attention.items())
        yield Feature("attention", "\n".join((config.attention, *states)), "other kernels for the same attention")
    if config.graphs is not None:
        lines = (f"{name}: {hook.stats()}" for name, hook in attached.graphs.items())
        why = "computed forwards are replayed as CUDA graphs, with the bits of the model; skipped steps stay outside"
        yield Feature("graphs", "\n".join((f"at most {config.graphs.max_graphs} of each denoiser", *lines)), why)


def _vae(attached: Attached) -> Feature:
    ways = [name for name in attached.features if name.startswith("vae_")]
    by_plan = " and ".join(name for name in ways if getattr(attached.config, name) is None)
    why = f"gpu_memory is not enough without {by_plan}" if by_plan else "as the settings say"
    return Feature("VAE", f"{', '.join(ways)}: {', '.join(type(vae).__name__ for vae in attached.vaes)}", why)


def _offload(attached: Attached) -> Feature:
    offloaded = attached.offloaded
    assert offloaded is not None
    done, plan = offloaded.stats().ahead, offloaded.plan
    lines: list[Any] = [f"{offloaded.config.mode}, computing on {offloaded.execution_device}", plan]
    lines += [offloaded.tiers] * plan.offloads_anything
    lines += [f"{name}: {done[name]}" for name in offloaded.time_layers if name in done]
    lines += [f"{name}: not computed ahead: {why}" for name, why in offloaded.not_ahead.items() if why]
    moves, stays = "weights are on the device only when they are needed", "the budget holds everything"
    return Feature("offload", "\n".join(map(str, lines)), moves if plan.offloads_anything else stays)


def _cache(attached: Attached) -> Feature:
    cache, why, lines = attached.cache, "skips steps that would change little", list[str]()
    if not isinstance(cache, TeaCacheBackend):
        settings = type(cache).__name__.removesuffix("Backend")
    elif isinstance(cache.config, AutoConfig):
        settings = f"auto {cache.config.summary()}"
        why = "leaves out whole forwards, as many as the error of its last forecast allows"
    else:
        settings = f"TeaCache {cache.config.summary()}"
        why = why if cache.config.schedule is None else "skips the steps of its schedule"
        # The rest of a denoiser that is made of blocks also runs at skipped steps.
        anatomies = ((name, module, find_anatomy(module)) for name, module in attached.denoisers.items())
        lines = [f"{name}: {coverage(module, anatomy)}" for name, module, anatomy in anatomies if anatomy.stacks]
    if (num_ranks := attached.config.num_ranks) > 1:
        lines.append(f"decides from the figures of all {num_ranks} ranks, so all skip the same steps")
    return Feature("cache", "\n".join((settings, *lines)), why)


def _places(pipe: Any) -> tuple[tuple[Place, ...], set[HookOrder]]:
    """All that has hooks, grouped by its chain, and the kinds of hooks: runs of the pipeline, then modules."""
    found: dict[tuple[str, ...], Counter[str]] = {}
    kinds: set[HookOrder] = set()
    for part, loaded in loaded_parts(pipe).items():
        for path, module in named_parts(loaded.module).items() if loaded.module is not None else ():
            hooks = HookRegistry.get_or_create(module).chain
            kinds.update(order for _, order in hooks)
            chain = [f"{name} ({order.name.lower()})" for name, order in hooks]
            chain += ["compiled"] * (compiled_call(module) is not None)
            if chain:
                starred = re.sub(r"\.\d+(?=\.|$)", ".*", f"{part}.{path}".rstrip("."))
                found.setdefault(tuple(chain), Counter())[starred] += 1
    places = [Place(tuple(paths), paths.total(), chain) for chain, paths in found.items()]
    around = tuple(pipeline_hooks(pipe))
    return (*[Place(("each run of the pipeline",), 1, around)] * bool(around), *places), kinds
