"""How is a model sharded, and how is it made whole again?"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch

from .. import tree
from ..arch import Anatomy, find_anatomy
from ..arch.modules import unwrapped
from ..errors import HookConflictError, ModelError, SettingError
from ..hooks import NOT_BYPASSED, BranchHook, HookOrder, HookRegistry, ModelHook, call_context
from ..other_libraries import attention_backend
from ..trace.watch import Watcher
from .candidates import MISFIT, Candidate, candidates
from .failures import ShardingError, StrategyError
from .mesh import ParallelMesh, SequenceParallelConfig, StrategyName, make_mesh
from .plan import SequenceParallelModelPlan, declared_plan, place_plan
from .region import Phase, Region, Trace, strategy_of
from .shard import AroundHook, BlockHook, attach_hooks, detach_hooks, hook_for
from .values import difference, most_different

ROOT, INNERMOST, BLOCK = "sequence_parallel", "sequence_parallel_innermost", "sequence_parallel_block"
"""The names of the hooks that are on a sharded model whatever its plan."""


class Sharding:
    """What is attached to one model."""

    def __init__(self, model: torch.nn.Module, mesh: ParallelMesh, region: Region, anatomy: Anatomy) -> None:
        self.model = model
        self.mesh = mesh
        self.region = region
        self.anatomy = anatomy
        self.source = ""
        """Where the plan is from."""
        self.plan: SequenceParallelModelPlan = {}
        self.rejected: dict[str, str] = {}
        """Plans that did not fit, and why."""
        self.is_trusted = False
        self.declared: Candidate | None = None
        self._hooks: list[AroundHook] = []
        self._root_hooks: list[AroundHook] = []
        self._traces: dict[Any, Trace] = {}

    def adopt(self, candidate: Candidate) -> None:
        """Attach a plan in place of the one before."""
        placements = place_plan(self.model, candidate.plan) if candidate.plan else ()
        hooks = [hook_for(placement, self.region) for placement in placements]
        self.drop()
        self.region.shares_attention = candidate.shares_attention
        # What the plan does at the model itself is done by the innermost hook, after a rehearsal that may change it.
        below = [hook for hook in hooks if hook.placement.path]
        attach_hooks(below)
        self._hooks, self._root_hooks = below, [hook for hook in hooks if not hook.placement.path]
        self.plan, self.source = candidate.plan, candidate.source
        self._traces.clear()

    def drop(self) -> None:
        """Detach the plan."""
        detach_hooks(self._hooks)
        self.plan, self.source, self._hooks, self._root_hooks = {}, "", [], []

    # ---------------------------------------------------------------------------------------- one call

    def call(self, args: Any, kwargs: Any) -> Any:
        """The model's call, sharded."""
        trace = self._traces.get(tree.signature((args, kwargs)))
        with self.region.running(Phase.ON, trace):
            output = self.model(*args, **kwargs)
            ran = self.region.num_blocks_run or not self.region.blocks
            if ran and not self.region.num_parallel:
                raise ShardingError(
                    f"A sharded forward of {type(self.model).__name__} ran no attention on several ranks, so its ranks "
                    "did not see each other's tokens. Its attention is not torch's scaled dot product attention, or "
                    "the plan splits nothing that attends."
                )
        return output

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Rehearse what is new, and find a plan if there is none yet; then split what the plan splits here."""
        given = args, kwargs
        signature = tree.signature(given)
        if signature not in self._traces:
            eager: Any = torch.compiler.set_stance("force_eager")  # A rehearsal is not worth a compilation.
            with eager, self.region.running(Phase.OFF), call_context(request=None, branch=None):
                self._traces[signature] = self._agreed_trace(given) if self.is_trusted else self._choose(given)
        self.region.use(self._traces[signature])
        return self._before(args, kwargs)

    def _before(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for hook in self._root_hooks:
            args, kwargs = hook.before(self.model, args, kwargs)
        return args, kwargs

    def end(self, output: Any) -> Any:
        """Gather what the plan gathers here."""
        for hook in reversed(self._root_hooks):
            output = hook.after(output)
        return output

    def _agreed_trace(self, given: tuple[Any, Any]) -> Trace:
        """A rehearsal that succeeded on all ranks: if it fails on one, it fails on all."""
        failure: BaseException | None = None
        trace = Trace()
        try:
            trace = self.region.rehearse(lambda: self._run_bare(given))
            if not trace.num_parallel(self.region.group.size, shares_attention=self.region.shares_attention):
                raise ShardingError(
                    f"No attention of {type(self.model).__name__} gets a part of a sequence: its attention is not "
                    "torch's scaled dot product attention, or the plan splits nothing that attends."
                )
        except MISFIT as error:
            failure = error
        flag = torch.tensor([float(failure is not None)], device=_device_of(given))
        if self.region.group.max(flag).item():
            if failure is None:
                failure = ShardingError("The plan does not fit on another rank; see its message.")
            raise failure
        return trace

    def _run_bare(self, given: tuple[Any, Any]) -> Any:
        """The model itself with what the plan does at its root, and no other hook of its root."""
        args, kwargs = tree.map_tensors(lambda tensor: tensor, given)  # Some models empty the lists they are given.
        bare = ModelHook().call_original
        with torch.no_grad():
            if self.region.phase is Phase.OFF:
                return bare(self.model, *args, **kwargs)
            args, kwargs = self._before(args, kwargs)
            return self.end(bare(self.model, *args, **kwargs))

    # ---------------------------------------------------------------------------------------- choosing a plan

    def _choose(self, given: tuple[Any, Any]) -> Trace:
        """Find a plan that gives the unsharded output, and attach it."""
        watched = Watcher(self.model, self.anatomy, keeps_calls=True)
        with watched.watching():
            reference = self._run_bare(given)
        derived = candidates(self.model, self.anatomy, watched, self.region.group.size, self.rejected)
        for candidate in itertools.chain([self.declared] if self.declared else [], derived):
            try:
                if candidate.source != self.source:
                    self.adopt(candidate)
                trace = self._agreed_trace(given)
                self._check(given, trace, reference)
            except StrategyError:  # No other plan would help.
                raise
            except MISFIT as error:
                self.rejected[candidate.source] = f"{type(error).__name__}: {error}"
                self.drop()
                continue
            self.is_trusted = True
            return trace
        reasons = "; ".join(f"{source}: {reason}" for source, reason in self.rejected.items())
        raise ModelError(
            f"No plan was found by which {type(self.model).__name__} gives the same output on several ranks. Write one "
            f"(see docs/guides/parallel.md), or run it on one rank. What was tried: {reasons}."
        )

    def _check(self, given: tuple[Any, Any], trace: Trace, reference: Any) -> None:
        with self.region.running(Phase.ON, trace):
            output = self._run_bare(given)
        apart = difference(output, reference)
        apart = float(self.region.group.max(torch.tensor([apart], device=_device_of(given))).item())
        if not apart <= most_different(reference):
            raise ShardingError(f"the output differs from the unsharded one by {apart:.1e} of its norm")


class SequenceParallelHook(ModelHook):
    """Brings a model's calls to its sharding."""

    order = HookOrder.SHARD

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        self._branches = BranchHook()
        self._branches.initialize_hook(sharding.model)

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.sharding.region.phase is not Phase.OFF:
            return NOT_BYPASSED
        # The branch is told by the tensors that the pipeline passes, not by the parts that are made of them.
        self._branches.pre_forward(module, *args, **kwargs)
        try:
            return self.sharding.call(args, kwargs)
        finally:
            self._branches.post_forward(module, None)


class _InnermostHook(ModelHook):
    """Does what is due at the model itself when all other hooks have made it ready to run."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._sharding.begin(args, kwargs)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return self._sharding.end(output)


# ------------------------------------------------------------------------------------------------ public


def apply_sequence_parallel(
    module: torch.nn.Module,
    config: SequenceParallelConfig,
    plan: SequenceParallelModelPlan,
    *,
    strategy: StrategyName | None = None,
    mesh: ParallelMesh | None = None,
) -> Sharding | None:
    """Shard a model as a plan says. The plan is taken at its word; nothing is attached for a single rank."""
    place_plan(module, plan)
    return _attach(module, config, mesh, strategy, Candidate("given", plan), is_trusted=True)


def remove_sequence_parallel(module: torch.nn.Module, plan: SequenceParallelModelPlan | None = None) -> None:
    """Make a model whole again. A model that is not sharded stays as it is."""
    module = unwrapped(module)
    if plan is not None:
        place_plan(module, plan)
    sharding = sharding_of(module)
    if sharding is None:
        return
    sharding.drop()
    for stack in sharding.anatomy.stacks:
        for block in stack.modules(module):
            HookRegistry.get_or_create(block).remove_hook(BLOCK)
    registry = HookRegistry.get_or_create(module)
    registry.remove_hook(INNERMOST)
    registry.remove_hook(ROOT)


def enable_sequence_parallel_for_model(
    model: torch.nn.Module,
    config: SequenceParallelConfig | None = None,
    *,
    strategy: StrategyName | None = None,
    mesh: ParallelMesh | None = None,
) -> Sharding | None:
    """Shard a model by the plan that it comes with, or by one that is derived from its blocks. Either is compared
    with the unsharded output at the first forward. Without a config, all ranks share one sequence."""
    model = unwrapped(model)
    declared = declared_plan(model)
    if declared is None and not find_anatomy(model).stacks:
        raise ModelError(
            f"No plan can be had for {type(model).__name__}: it has neither _sp_plan nor _cp_plan, and no stack of "
            "blocks was found from which one could be derived. Give one: apply_sequence_parallel(model, config, plan)."
        )
    if config is None:
        config = SequenceParallelConfig.of_strategy(strategy or "auto", _world_size(), _num_heads(model))
        strategy = strategy or "auto"
    candidate = Candidate(declared[0], declared[1]) if declared else None
    return _attach(model, config, mesh, strategy, candidate, is_trusted=False)


def disable_sequence_parallel_for_model(model: torch.nn.Module) -> None:
    """Make a model whole again, to the bit. A model that is not sharded stays as it is."""
    remove_sequence_parallel(model)


def sharding_of(model: torch.nn.Module) -> Sharding | None:
    """What is attached to a model, if it is sharded."""
    hook = HookRegistry.get_or_create(unwrapped(model)).get_hook(ROOT)
    return hook.sharding if isinstance(hook, SequenceParallelHook) else None


def _attach(
    model: torch.nn.Module,
    config: SequenceParallelConfig,
    mesh: ParallelMesh | None,
    strategy: StrategyName | None,
    candidate: Candidate | None,
    *,
    is_trusted: bool,
) -> Sharding | None:
    model = unwrapped(model)
    if sharding_of(model) is not None:
        raise HookConflictError(
            f"This {type(model).__name__} is sharded already. Call disable_sequence_parallel_for_model(model) first."
        )
    if strategy not in (None, "auto", config.strategy):
        raise SettingError(
            f"strategy={strategy!r} does not go with {config}, which is {config.strategy!r}. Give one of them, or "
            'strategy="auto".'
        )
    mesh = mesh or make_mesh(config)
    if mesh.sequence.size != config.sequence_parallel_size:
        raise SettingError(f"{config} needs {config.sequence_parallel_size} ranks; the mesh has {mesh.sequence.size}.")
    if mesh.sequence.size == 1:
        return None
    _check_backends(model)
    anatomy = find_anatomy(model)
    blocks = [path for stack in anatomy.stacks for path in stack.block_paths]
    region = Region(mesh, strategy_of(config, mesh, or_gathered=strategy == "auto"), blocks)
    sharding = Sharding(model, mesh, region, anatomy)
    sharding.is_trusted = is_trusted
    with contextlib.ExitStack() as undo:
        undo.callback(sharding.drop)
        if candidate is not None:
            try:
                sharding.adopt(candidate)
                sharding.declared = candidate
            except SettingError as error:  # A declared plan that is for another size of the model.
                if is_trusted or not anatomy.stacks:
                    raise
                sharding.rejected[candidate.source] = str(error)
        _register(undo, model, ROOT, SequenceParallelHook(sharding))
        _register(undo, model, INNERMOST, _InnermostHook(sharding))
        for stack in anatomy.stacks:
            for path, block in zip(stack.block_paths, stack.modules(model), strict=True):
                if BLOCK not in HookRegistry.get_or_create(block):
                    _register(undo, block, BLOCK, BlockHook(path, region))
        undo.pop_all()
    return sharding


def _register(undo: contextlib.ExitStack, module: torch.nn.Module, name: str, hook: ModelHook) -> None:
    registry = HookRegistry.get_or_create(module)
    registry.register_hook(name, hook)
    undo.callback(registry.remove_hook, name)


def _check_backends(model: torch.nn.Module) -> None:
    """Refuse an attention that is not torch's own: it would not be seen."""
    for path, module in model.named_modules():
        name = attention_backend(module)
        if name is not None and not name.startswith(("native", "_native", "flex")):
            raise SettingError(
                f"The attention backend of {path!r} is {name!r}, which cannot be sharded; torch's own can. Call "
                'model.set_attention_backend("native") first.'
            )


def _num_heads(model: torch.nn.Module) -> int | None:
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# ------------------------------------------------------------------------------------------------ values


def _device_of(given: tuple[Any, Any]) -> torch.device:
    return next((tensor.device for tensor in tree.tensors(given)), torch.device("cpu"))
