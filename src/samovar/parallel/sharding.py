"""Shards a model over ranks by a plan: given, declared by the model, or derived."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch.nn import Module

from ..arch import find_anatomy
from ..arch.modules import unwrapped
from ..core import nested
from ..core.errors import HookConflictError, ModelError, SettingError, ShardingError, StrategyError
from ..core.interop import attention_backend
from ..hooks import Handle, HookRegistry, ModelHook, call_context, install_hook
from ..trace.forward import Watcher
from ..trace.twin import TrialFailed, trial
from .derive import Candidate, candidates
from .mesh import SequenceParallelConfig, make_mesh, rank_and_world
from .plan import Placement, SequenceParallelModelPlan, declared_plan, invalid, place_plan, read_plan
from .region import Forward, Region, Trace
from .shard import AroundHook, BlockHook, PlanHook, SequenceParallelGatherHook, SequenceParallelSplitHook
from .strategies import strategy_of

ROOT, INNERMOST, BLOCK = "sequence_parallel", "sequence_parallel_innermost", "sequence_parallel_block"
"""Names of the hooks that a sharded model has whatever its plan."""


class Sharding(Handle, ModelHook):
    """A sharded model. As its innermost hook, when all others have made the model ready to run, it rehearses forwards,
    and does what the plan says at the model itself. On a single rank nothing is attached."""

    def __init__(self, model: Module, region: Region, plan: Candidate | None, *, is_trusted: bool) -> None:
        """A plan that is trusted is not compared with the unsharded output."""
        super().__init__()
        self.region = region
        self.source = ""
        """Where the plan comes from; empty as long as there is none."""
        self.plan: SequenceParallelModelPlan = {}
        self.rejected: dict[str, str] = {}
        """Plans that did not fit, and why."""
        self._model = model
        self._anatomy = find_anatomy(model)
        self._given = plan
        self._is_trusted = is_trusted
        self._plan_hooks = contextlib.ExitStack()
        self._bare_root = self._root = PlanHook(Placement("", "", model), region)
        """What the plan does at the model itself: after a rehearsal, which may change the plan."""
        self._traces: dict[Any, Trace] = {}

    def follows(self, plan: SequenceParallelModelPlan) -> bool:
        """Whether this is the plan of the sharding: the one it was given, or the one that it has found."""
        return plan in (self.plan, self._given and self._given.plan)

    def attach(self) -> None:
        """Attach all hooks; if anything is refused, nothing stays attached."""
        with self._undo:
            self._undo.callback(self._drop_plan)
            if self._given is not None and self._is_trusted:
                self._adopt(self._given)
            install_hook(self._undo, self._model, ROOT, AroundHook(self._call))
            install_hook(self._undo, self._model, INNERMOST, self)
            for stack in self._anatomy.stacks:
                for path, block in zip(stack.block_paths, stack.modules(self._model), strict=True):
                    if BLOCK not in HookRegistry.get_or_create(block):
                        install_hook(self._undo, block, BLOCK, BlockHook(path, self.region))
            self._undo = self._undo.pop_all()

    def _adopt(self, candidate: Candidate) -> None:
        """Attach a plan in place of the previous one."""
        placements = place_plan(self._model, candidate.plan) if candidate.plan else ()
        self._drop_plan()
        with contextlib.ExitStack() as undo:
            for placement in placements:
                kind = SequenceParallelGatherHook if placement.gathers else SequenceParallelSplitHook
                hook = kind(placement, self.region)
                if placement.path:
                    name = f"sp_{'output' if placement.gathers else 'input'}---{placement.key}"
                    install_hook(undo, placement.module, name, hook)
                else:
                    self._root = hook
            self._plan_hooks = undo.pop_all()
        self.plan, self.source = candidate.plan, candidate.source
        self.region.shares_attention = candidate.shares_attention

    def _drop_plan(self) -> None:
        self._plan_hooks.close()
        self.plan, self.source, self._root = {}, "", self._bare_root
        self._traces.clear()

    # ---------------------------------------------------------------------------------------- one call

    def _call(self, model: Module, args: Any, kwargs: Any) -> Any:
        """The model's call, sharded."""
        forward = Forward(self._traces.get(nested.signature((args, kwargs))) or Trace())
        with self.region.running(forward):
            output = model(*args, **kwargs)
        self._check_parallel(forward)
        return output

    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Rehearse new shapes, and find a plan if there is none yet; then split what the plan splits at the root."""
        given, forward = (args, kwargs), self.region.forward
        signature = nested.signature(given)
        if signature not in self._traces:
            eager: Any = torch.compiler.set_stance("force_eager")  # A rehearsal is not worth a compilation.
            with eager, self.region.running(None), call_context(request=None, branch=None):
                if not self._is_trusted:
                    self._choose(given)
                self._traces[signature] = self._rehearse(given)
        assert forward is not None
        forward.trace = self._traces[signature]
        return self._root.before(args, kwargs)

    def post_forward(self, module: Module, output: Any) -> Any:
        """Gather what the plan gathers at the root."""
        return self._root.after(output)

    def _check_parallel(self, forward: Forward) -> None:
        if (forward.num_blocks_run or not self._anatomy.stacks) and not forward.is_parallel:
            what = forward.rare or "attention that is not torch's scaled dot product attention"
            raise ShardingError(
                f"A sharded forward of {type(self._model).__name__} runs no attention on several ranks: they would not "
                f"see each other's tokens. They cannot share {what}, or the plan splits no tensor that reaches an "
                "attention."
            )

    def _rehearse(self, given: tuple[Any, Any]) -> Trace:
        """A rehearsal that succeeded on all ranks: if it fails on one, it fails on all."""
        failure: BaseException | None = None
        forward = Forward()
        try:
            with trial(given):
                forward = self.region.rehearse(lambda: self._run_bare(given))
                self._check_parallel(forward)
        except TrialFailed as error:
            failure = error.__cause__
        if self.region.group.max(float(failure is not None), given):
            raise failure or ShardingError("The plan failed on another rank; see the error of that rank.")
        return forward.trace

    def _run_bare(self, given: tuple[Any, Any]) -> Any:
        """The model itself, with what the plan does at its root but no other hook of its root."""
        args, kwargs = nested.map_tensors(lambda tensor: tensor, given)  # Some models empty the lists they are given.
        if self.region.forward is None:
            return self.call_original(self._model, *args, **kwargs)
        args, kwargs = self._root.before(args, kwargs)
        return self._root.after(self.call_original(self._model, *args, **kwargs))

    def _choose(self, given: tuple[Any, Any]) -> None:
        """Find a plan that gives the unsharded output, and attach it."""
        watched = Watcher(self._model, self._anatomy, keeps_calls=True)
        with watched.watching(), torch.no_grad():
            reference = self._run_bare(given)
        derived = candidates(self._model, self._anatomy, watched, self.region.group.size, self.rejected)
        for candidate in itertools.chain([self._given] if self._given else [], derived):
            try:
                with trial(given):
                    self._verify(candidate, given, reference)
            except TrialFailed as error:
                if isinstance(error.__cause__, StrategyError):  # No other plan would help.
                    raise error.__cause__ from None
                self.rejected[candidate.source] = str(error)
                self._drop_plan()
            else:
                self._is_trusted = True
                return
        reasons = "; ".join(f"{source}: {reason}" for source, reason in self.rejected.items())
        raise ModelError(
            f"Found no plan with which {type(self._model).__name__} gives the same output on several ranks. Write one "
            f"(see docs/guides/parallel.md), or run it on one rank. Tried: {reasons}."
        )

    def _verify(self, candidate: Candidate, given: tuple[Any, Any], reference: Any) -> None:
        """Attach a plan; an error if it does not give the unsharded output."""
        self._adopt(candidate)
        with self.region.running(Forward(self._rehearse(given))):
            output = self._run_bare(given)
        apart = self.region.group.difference(output, reference)
        if apart:
            raise ShardingError(f"the output differs from the unsharded one by {apart:.1e} of its norm")


# ------------------------------------------------------------------------------------------------ public


def apply_sequence_parallel(
    module: Module, config: SequenceParallelConfig, plan: SequenceParallelModelPlan
) -> Sharding:
    """Shard a model by a plan, which is trusted to be right. Nothing is attached for a single rank."""
    plan = read_plan(plan)
    place_plan(module, plan)
    return _attach(module, config, Candidate("given", plan), is_trusted=True)


def enable_sequence_parallel_for_model(model: Module, config: SequenceParallelConfig | None = None) -> Sharding:
    """Shard a model by the plan that it comes with, or by one derived from its blocks. Either is compared with the
    unsharded output at the first forward. Without a config, all ranks share one sequence: by Ulysses, and by gathered
    keys and values in attentions that have fewer heads than there are ranks."""
    model, declared = unwrapped(model), declared_plan(model)
    if not find_anatomy(model).stacks:
        if declared is None:
            raise ModelError(
                f"{type(model).__name__} has no plan: it has neither _sp_plan nor _cp_plan, and no stack of blocks "
                "from which to derive one. Give one: apply_sequence_parallel(model, config, plan)."
            )
        place_plan(model, declared[1])
    return _attach(model, config, Candidate(*declared) if declared else None, is_trusted=False)


def remove_sequence_parallel(module: Module, plan: SequenceParallelModelPlan) -> None:
    """Take off the sharding of this plan: the module is what it was before. Does nothing if it is not sharded."""
    sharding = sharding_of(module)
    if sharding is not None and not sharding.follows(read_plan(plan)):
        raise invalid(
            f"This {type(unwrapped(module)).__name__} is sharded by another plan than {plan}. Give the plan of its "
            "sharding, or call disable_sequence_parallel_for_model(model)."
        )
    disable_sequence_parallel_for_model(module)


def disable_sequence_parallel_for_model(model: Module) -> None:
    """Take off a model's sharding, whatever its plan. Does nothing if it is not sharded."""
    sharding = sharding_of(model)
    if sharding is not None:
        sharding.detach()


def sharding_of(model: Module) -> Sharding | None:
    """The sharding of a model, if it is sharded."""
    hook = HookRegistry.get_or_create(unwrapped(model)).get_hook(INNERMOST)
    return hook if isinstance(hook, Sharding) else None


def _attach(
    model: Module, config: SequenceParallelConfig | None, plan: Candidate | None, *, is_trusted: bool
) -> Sharding:
    model = unwrapped(model)
    if sharding_of(model) is not None:
        raise HookConflictError(
            f"This {type(model).__name__} is sharded already. Call detach() on the handle of the first sharding."
        )
    chosen = config or SequenceParallelConfig.from_name("ulysses", rank_and_world()[1])
    mesh = make_mesh(chosen)
    strategy = strategy_of(chosen, mesh, or_gathered=config is None)
    sharding = Sharding(model, Region(mesh.sequence, strategy), plan, is_trusted=is_trusted)
    if mesh.sequence.size > 1:
        _check_backends(model)
        sharding.attach()
    return sharding


def _check_backends(model: Module) -> None:
    """Refuse attention backends that would not be seen."""
    for path, module in model.named_modules():
        name = attention_backend(module)
        if name is not None and not name.startswith(("native", "_native", "flex")):
            raise SettingError(
                f"The attention backend of {path!r} is {name!r}, which cannot be sharded; torch's own can. Call "
                'model.set_attention_backend("native") first.'
            )
