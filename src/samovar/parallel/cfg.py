"""How are the branches of classifier-free guidance computed on different ranks?

A pipeline that batches its branches gives the model a batch: each rank takes its part. One that calls the model
once for each branch gets, from every call, tensors that are not there yet: each rank computes the branch that is
its own, and they exchange what they have when the pipeline first uses any of it. Every rank runs the same pipeline,
so all come to that point alike. A decision of a cache is agreed on once in a step: a rank asks for it in its first
call that needs one, or joins at that point. The first step is computed on all ranks: it tells how many branches there
are and the form of the output, and a batch that cannot be split shows there.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import tree
from ..arch.modules import parameters_of, unwrapped
from ..errors import HookConflictError
from ..hooks import (
    NOT_BYPASSED,
    BranchHook,
    HookOrder,
    HookRegistry,
    ModelHook,
    current_context,
    role_by_name,
)
from .collectives import Group
from .deferred import DeferredTensor
from .layout import spread
from .mesh import ParallelMesh, join
from .values import is_close

HOOK = "cfg_parallel"


@dataclass
class _Pending:
    """A call whose output has not been exchanged."""

    owner: int
    tensors: list[torch.Tensor]
    """On the owner the output itself, elsewhere tensors of the same shapes without data."""
    is_done: bool = False


@dataclass
class CfgState:
    """What is known of the calls of one model."""

    branches: OrderedDict[Hashable, list[str]] = field(default_factory=OrderedDict)
    """By request, in the order in which they were first seen."""
    forms: dict[Any, Any] = field(default_factory=dict)
    """By the shapes of the inputs: an output, its tensors without data."""
    splits: dict[Any, bool] = field(default_factory=dict)
    """By the shapes of the inputs: whether such a batch can be split."""
    pending: list[_Pending] = field(default_factory=list)
    last_call: tuple[Hashable, int] = (None, -1)
    """The request and branch of the last call that was not computed on all ranks."""
    num_deferred: int = 0
    num_split: int = 0


class CfgParallelHook(ModelHook):
    """Lets each rank compute its own branches."""

    order = HookOrder.SHARD
    most_requests = 16

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self.state = CfgState()
        self._branch_hook = BranchHook()
        self._parameters: tuple[str, ...] = ()
        self._is_inside = False

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._branch_hook.initialize_hook(module)
        self._parameters = tuple(parameters_of(module))
        return module

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self.state = CfgState()
        self.mesh.branches.agreed = None
        return module

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return NOT_BYPASSED
        self._branch_hook.pre_forward(module, *args, **kwargs)
        self._is_inside = True
        try:
            return self._answer(module, args, kwargs)
        finally:
            self._is_inside = False
            self._branch_hook.post_forward(module, None)

    def _answer(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        size = self._batch_size(args, kwargs)
        if size is not None and size >= self.mesh.cfg.size:
            return self._split_batch(module, size, args, kwargs)
        return self._one_branch(module, args, kwargs)

    # ---------------------------------------------------------------------------------------- a call for each branch

    def _one_branch(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """This call's output, now or later."""
        branch = current_context().branch
        if branch is None:
            return self._on_all_ranks(module, args, kwargs)
        branches, signature = self._branches(), tree.signature((args, kwargs))
        is_new = branch not in branches
        if is_new:
            branches.append(branch)
        form = self.state.forms.get(signature)
        # A first step is computed by all ranks alike, so that no rank has one decision more to agree on than others.
        if is_new or form is None or len(branches) == 1:
            output = self._on_all_ranks(module, args, kwargs)
            self.state.forms[signature] = tree.map_tensors(lambda tensor: tensor.to("meta"), output)
            return output
        index, size, here = branches.index(branch), self.mesh.cfg.size, self.mesh.cfg.index
        self._begin_call(index)
        # A rank without a branch computes one that another has, rather than nothing.
        computes = index % size == here or (here >= len(branches) and here % len(branches) == index)
        device = next(tree.tensors((args, kwargs))).device
        if computes:
            with self._marked("is_deferred"):
                output = module(*args, **kwargs)
        else:
            output = tree.map_tensors(lambda tensor: torch.empty_like(tensor, device=device), form)
        pending = _Pending(index % size, list(tree.tensors(output)))
        self.state.pending.append(pending)
        self.state.num_deferred += not computes
        places = iter(range(len(pending.tensors)))
        return tree.map_tensors(lambda tensor: DeferredTensor(tensor, self._fetcher(pending, next(places))), output)

    def _on_all_ranks(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._end_step()
        return module(*args, **kwargs)

    def _begin_call(self, index: int) -> None:
        """See whether a step begins with a call: one of a branch that was called before, or of another request."""
        request, last = current_context().request, self.state.last_call
        if request != last[0] or index <= last[1]:
            self._end_step()
        self.state.last_call = request, index

    def _end_step(self) -> None:
        """What the ranks agreed on is past. All of them come here alike; what some have not asked yet they do first."""
        if self.state.pending:
            self._exchange()
        self.mesh.branches.agreed = None

    @contextlib.contextmanager
    def _marked(self, what: str) -> Iterator[None]:
        """Say what the running call is to other ranks."""
        setattr(self.mesh.branches, what, True)
        try:
            yield
        finally:
            setattr(self.mesh.branches, what, False)

    def _fetcher(self, pending: _Pending, place: int) -> Callable[[], torch.Tensor]:
        def fetch() -> torch.Tensor:
            if not pending.is_done:
                self._exchange()
            return pending.tensors[place]

        return fetch

    def _exchange(self) -> None:
        """Give away what this rank has computed since the last time, and get the rest."""
        waiting, self.state.pending = self.state.pending, []
        if waiting:
            join(self.mesh, waiting[0].tensors[0].device)
        for pending in waiting:
            pending.tensors = [self.mesh.cfg.broadcast(tensor, pending.owner) for tensor in pending.tensors]
            pending.is_done = True

    def _branches(self) -> list[str]:
        known = self.state.branches
        branches = known.setdefault(current_context().request, [])
        known.move_to_end(current_context().request)
        if len(known) > self.most_requests:
            known.popitem(last=False)
        return branches

    # ---------------------------------------------------------------------------------------- a batch of branches

    def _batch_size(self, args: Any, kwargs: Any) -> int | None:
        """How many items the sample has."""
        for name, value in (*zip(self._parameters, args, strict=False), *kwargs.items()):
            if role_by_name(name) != "conditioning":
                if isinstance(value, torch.Tensor) and value.ndim >= 2:
                    return value.shape[0]
                if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
                    return len(value)
        return None

    def _split_batch(self, module: torch.nn.Module, size: int, args: Any, kwargs: Any) -> Any:
        signature = tree.signature((args, kwargs))
        if signature not in self.state.splits:
            # The trial is no step of the run: it is computed without other hooks, so that nothing is kept of it.
            whole = self.call_original(module, *args, **kwargs)
            self.state.splits[signature] = self._can_split(module, size, args, kwargs, whole)
        if not self.state.splits[signature]:
            return self._one_branch(module, args, kwargs)
        self.state.num_split += 1
        with self._marked("splits_batch"):
            return self._part_of_batch(module.__call__, size, args, kwargs)

    def _can_split(self, module: torch.nn.Module, size: int, args: Any, kwargs: Any, whole: Any) -> bool:
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.call_original(module, *args, **kwargs)

        failed = 0.0
        try:
            run(*_own_items(args, size, self.mesh.cfg), **_own_items(kwargs, size, self.mesh.cfg))
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError):
            failed = 1.0
        device = next(tree.tensors(whole)).device
        if self.mesh.cfg.max(torch.tensor([failed], device=device)).item():
            return False
        same = is_close(self._part_of_batch(run, size, args, kwargs), whole)
        return not self.mesh.cfg.max(torch.tensor([float(not same)], device=device)).item()

    def _part_of_batch(self, run: Callable[..., Any], size: int, args: Any, kwargs: Any) -> Any:
        group = self.mesh.cfg
        output = run(*_own_items(args, size, group), **_own_items(kwargs, size, group))
        return _all_items(output, size, group)


def _own_items(value: Any, size: int, group: Group) -> Any:
    """The part of a batch that is this rank's, in whatever it is."""
    counts = spread(size, group.size)
    start, count = sum(counts[: group.index]), counts[group.index]
    if isinstance(value, torch.Tensor):
        return value.narrow(0, start, count) if value.ndim and value.shape[0] == size else value
    if isinstance(value, dict):
        return {key: _own_items(part, size, group) for key, part in value.items()}
    if isinstance(value, list) and len(value) == size and not _holds_batches(value, size):
        return value[start : start + count]
    return type(value)(_own_items(part, size, group) for part in value) if type(value) in (list, tuple) else value


def _holds_batches(values: list[Any], size: int) -> bool:
    """Whether a list holds tensors of whole batches, one for each layer, say, and not one for each item."""
    return all(isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == size for value in values)


def _all_items(output: Any, size: int, group: Group) -> Any:
    """An output with the items of all ranks."""
    counts = spread(size, group.size)

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] != counts[group.index]:
            return tensor
        return torch.cat(group.gather_rows([tensor], counts, dim=0)[0])

    def lists(value: Any) -> Any:
        if (
            isinstance(value, list)
            and len(value) == counts[group.index]
            and all(isinstance(item, torch.Tensor) and item.shape == value[0].shape for item in value)
        ):
            return list(gathered(torch.stack(value)))
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(map(lists, value))
        return tree.map_tensors(gathered, value)

    return lists(output)


def apply_cfg_parallel(model: torch.nn.Module, mesh: ParallelMesh) -> CfgParallelHook | None:
    """Spread the branches of a model over the ranks of the mesh; nothing is attached for a single one."""
    model = unwrapped(model)
    if mesh.cfg.size == 1:
        return None
    registry = HookRegistry.get_or_create(model)
    if HOOK in registry:
        raise HookConflictError(
            f"The branches of this {type(model).__name__} are on several ranks already. Call remove_cfg_parallel first."
        )
    hook = CfgParallelHook(mesh)
    registry.register_hook(HOOK, hook)
    return hook


def remove_cfg_parallel(model: torch.nn.Module) -> None:
    """Let every rank compute all branches again. A model that was not spread stays as it is."""
    HookRegistry.get_or_create(unwrapped(model)).remove_hook(HOOK)
