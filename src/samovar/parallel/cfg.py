"""Different ranks compute the branches of classifier-free guidance.

If a pipeline batches its branches, each rank takes its part of the batch. If it calls the model once per branch, every
call returns tensors without values yet: each rank computes its own branches, and the ranks exchange outputs when the
pipeline first uses any of them. Every rank runs the same pipeline, so all get there alike. A cache's decision is agreed
on once per step: a rank asks in its first call that needs one, or joins at the exchange. All ranks compute the first
step: it shows how many branches there are and the form of the output, and whether a batch can be split.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map

from ..arch.modules import parameters_of, unwrapped
from ..core import nested
from ..core.errors import HookConflictError
from ..hooks import BranchHook, Handle, HookRegistry, current_context, install_hook, role_by_name
from ..hooks.handle import for_now
from ..trace.twin import TrialFailed, trial
from .collectives import Group
from .layout import spread
from .mesh import ParallelMesh, join
from .shard import AroundHook

HOOK = "cfg_parallel"

_STILL_DEFERRED = {
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
}
"""What pipelines do to one branch before they compute the next: they cut off the tokens of a reference image, if there
are any (cutting off nothing is an alias)."""


class DeferredTensor(Tensor):
    """A tensor of known shape whose values are fetched when they are first needed."""

    _fetch: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, fetch: Callable[[], Tensor], device: torch.device | None = None) -> DeferredTensor:
        make: Any = Tensor._make_wrapper_subclass
        device = device or like.device
        deferred: DeferredTensor = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        deferred._fetch = fetch
        deferred._value = None
        return deferred

    def value(self) -> Tensor:
        """The tensor itself."""
        if self._value is None:
            self._value = self._fetch()
        return self._value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.value(), memo)

    def numpy(self, *, force: bool = False) -> Any:
        return self.value().numpy(force=force)

    def tolist(self) -> list[Any]:
        return self.value().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _STILL_DEFERRED and isinstance(first, DeferredTensor) and first._value is None:
            form = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
            return cls(func(form, *args[1:]), lambda: func(first.value(), *args[1:], **kwargs), first.device)
        args, kwargs = tree_map(lambda part: part.value() if isinstance(part, cls) else part, (args, kwargs))
        return func(*args, **kwargs)


@dataclass
class _Pending:
    """A tensor that has not been exchanged."""

    owner: int
    tensor: Tensor
    """On the owner the tensor itself, elsewhere one of the same shape, with any values."""
    is_done: bool = False


class CfgParallelHook(AroundHook):
    """Lets each rank compute its own branches."""

    num_split = 0
    """Calls of which this rank computed some items of a batch."""
    num_deferred = 0
    """Calls that this rank left to others."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__(self._call)
        self.mesh = mesh
        self._branch_hook = BranchHook()
        self._parameters: Sequence[str] = ()
        self._forms: dict[Any, Any] = {}
        """By the shapes of the inputs: an output, its tensors without data."""
        self._splits: dict[Any, bool] = {}
        """By the shapes of the inputs: whether such a batch can be split."""
        self._pending: list[_Pending] = []
        self._begin(None)

    def _begin(self, request: Hashable) -> None:
        self._request = request
        self._branches: list[str] = []
        """In the order in which they were first seen."""
        self._last = -1
        """Branch of the last call that was not computed on all ranks."""

    def initialize_hook(self, module: Module) -> Module:
        self._parameters = tuple(parameters_of(module))
        return self._branch_hook.initialize_hook(module)

    def reset_state(self, module: Module) -> Module:
        self._begin(None)
        self._pending, self.mesh.branches.agreed = [], None
        return module

    def _call(self, module: Module, args: Any, kwargs: Any) -> Any:
        self._branch_hook.pre_forward(module, *args, **kwargs)
        try:
            return self._split_or_defer(module, args, kwargs)
        finally:
            self._branch_hook.post_forward(module, None)

    def _split_or_defer(self, module: Module, args: Any, kwargs: Any) -> Any:
        given = args, kwargs
        batch, signature = _Batch(self._batch_size(args, kwargs), self.mesh.cfg), nested.signature(given)
        if batch.size >= self.mesh.cfg.size and self._can_split(module, batch, given, signature):
            self.num_split += 1
            args, kwargs = batch.own(given)
            with for_now(self.mesh.branches, splits_batch=True):
                return batch.joined(module(*args, **kwargs))
        return self._one_branch(partial(module, *args, **kwargs), signature, next(nested.tensors(given)).device)

    # ---------------------------------------------------------------------------------------- one call per branch

    def _one_branch(self, run: Callable[[], Any], signature: Hashable, device: torch.device) -> Any:
        """This call's output, now or later."""
        context, form = current_context(), self._forms.get(signature)
        if context.request != self._request:
            self._end_step()
            self._begin(context.request)
        is_new = context.branch not in self._branches
        if is_new and context.branch is not None:
            self._branches.append(context.branch)
        # All ranks compute a first step alike, so that none has one decision more to agree on than others.
        if is_new or form is None or len(self._branches) == 1:
            self._end_step()
            output = run()
            self._forms[signature] = nested.without_data(output)
            return output
        index = self._branches.index(str(context.branch))
        if index <= self._last:
            self._end_step()
        self._last = index
        return self._deferred(run, index, form, device)

    def _deferred(self, run: Callable[[], Any], index: int, form: Any, device: torch.device) -> Any:
        """The output of a branch, which this rank or another one computes."""
        count = len(self._branches)
        size, here = self.mesh.cfg.size, self.mesh.cfg.index
        # A rank without a branch computes one that another has, rather than nothing.
        if index % size == here or (here >= count and here % count == index):
            with for_now(self.mesh.branches, is_deferred=True):
                output = run()
        else:
            output = nested.map_tensors(partial(torch.empty_like, device=device), form)
            self.num_deferred += 1

        def deferred(tensor: Tensor) -> Tensor:
            pending = _Pending(index % size, tensor)
            self._pending.append(pending)
            return DeferredTensor(tensor, partial(self._fetch, pending))

        return nested.map_tensors(deferred, output)

    def _end_step(self) -> None:
        """Forget what the ranks agreed on. All of them get here alike; first they exchange what is pending."""
        self._exchange()
        self._last, self.mesh.branches.agreed = -1, None

    def _fetch(self, pending: _Pending) -> Tensor:
        if not pending.is_done:
            self._exchange()
        return pending.tensor

    def _exchange(self) -> None:
        """Send what this rank has computed since the last exchange, and get the rest."""
        waiting, self._pending = self._pending, []
        if waiting:
            join(self.mesh, waiting[0].tensor.device)
        for pending in waiting:
            pending.tensor = self.mesh.cfg.broadcast(pending.tensor, pending.owner)
            pending.is_done = True

    # ---------------------------------------------------------------------------------------- a batch of branches

    def _batch_size(self, args: Any, kwargs: Any) -> int:
        """Number of items in the sample; 0 if it has no batch."""
        for name, value in (*zip(self._parameters, args, strict=False), *kwargs.items()):
            is_batch = (isinstance(value, Tensor) and value.ndim >= 2) or _is_list_of_tensors(value)
            if is_batch and role_by_name(name) != "conditioning":
                return len(value)
        return 0

    def _can_split(self, module: Module, batch: _Batch, given: tuple[Any, Any], signature: Hashable) -> bool:
        """Whether all ranks get from parts of such a batch what they get from the whole. The trial is not a step of the
        run: it runs without other hooks, so that they keep nothing of it."""
        if signature not in self._splits:
            whole, own = self.call_original(module, *given[0], **given[1]), None
            try:
                with trial(given):
                    args, kwargs = batch.own(given)
                    own = self.call_original(module, *args, **kwargs)
            except TrialFailed:
                pass
            has_failed = batch.group.max(float(own is None), whole)
            self._splits[signature] = not has_failed and not batch.group.difference(batch.joined(own), whole)
        return self._splits[signature]


class _Batch(NamedTuple):
    """A batch that ranks share."""

    size: int
    group: Group

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of items on each rank."""
        return spread(self.size, self.group.size)

    def own(self, value: Any) -> Any:
        """A value with this rank's items, wherever they are in it."""
        if isinstance(value, Tensor):
            return (
                value.split_with_sizes(self.counts)[self.group.index]
                if value.ndim and len(value) == self.size
                else value
            )
        if isinstance(value, dict):
            return {key: self.own(part) for key, part in value.items()}
        # A list may also hold tensors of whole batches, one per layer, say.
        is_batch = isinstance(value, list) and len(value) == self.size
        if is_batch and not all(isinstance(t, Tensor) and t.ndim > 1 and len(t) == self.size for t in value):
            start = sum(self.counts[: self.group.index])
            return value[start : start + self.counts[self.group.index]]
        return type(value)(map(self.own, value)) if type(value) in (list, tuple) else value

    def joined(self, value: Any) -> Any:
        """An output with the items of all ranks."""
        count = self.counts[self.group.index]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(map(self.joined, value))
        if _is_list_of_tensors(value) and len(value) == count and len({item.shape for item in value}) == 1:
            return list(self.group.gather(torch.stack(value), self.counts, dim=0))

        def gathered(tensor: Tensor) -> Tensor:
            is_own = tensor.ndim and len(tensor) == count
            return self.group.gather(tensor, self.counts, dim=0) if is_own else tensor

        return nested.map_tensors(gathered, value)


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Tensor)


def apply_cfg_parallel(model: Module, mesh: ParallelMesh) -> Handle:
    """Spread the branches of a model over the ranks of the mesh; nothing is attached for a single one."""
    model, undo = unwrapped(model), contextlib.ExitStack()
    if mesh.cfg.size > 1:
        if HOOK in HookRegistry.get_or_create(model):
            raise HookConflictError(
                f"The branches of this {type(model).__name__} are on several ranks already. Call detach() on the "
                "handle of the first apply_cfg_parallel."
            )
        install_hook(undo, model, HOOK, CfgParallelHook(mesh))
    return Handle(undo)
