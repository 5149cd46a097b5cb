"""How do different ranks compute the branches of classifier-free guidance?

If a pipeline batches its branches, each rank takes its part of the batch. If it calls the model once per branch, every
call returns tensors without values yet: each rank computes its own branches, and the ranks exchange outputs when the
pipeline first uses any of them. Every rank runs the same pipeline, so all get there alike. A cache's decision is agreed
on once per step: a rank asks in its first call that needs one, or joins at the exchange. All ranks compute the first
step: it shows how many branches there are and the form of the output, and whether a batch can be split.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..arch.modules import parameters_of, unwrapped
from ..core import nested
from ..core.errors import HookConflictError
from ..hooks import Handle, HookRegistry, current_context, install_hook, role_by_name
from ..hooks.handle import for_now
from ..trace.shadow import TrialFailed, trial
from .collectives import Group
from .layout import spread
from .mesh import ParallelMesh, join
from .shard import ModelCallHook

HOOK = "cfg_parallel"

# --------------------------------------------------------------------------- the tensor of another rank's branch

_STILL_DEFERRED = {
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
}
"""What pipelines do to one branch before they compute the next: they cut off the tokens of a reference image, if there
are any (cutting off nothing is an alias)."""


class DeferredTensor(torch.Tensor):
    """A tensor of known shape whose values are fetched when they are first needed."""

    _fetch: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, fetch: Callable[[], torch.Tensor], device: torch.device | None = None
    ) -> DeferredTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        device = device or like.device
        deferred: DeferredTensor = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        deferred._fetch = fetch
        deferred._value = None
        return deferred

    def value(self) -> torch.Tensor:
        """The tensor itself."""
        if self._value is None:
            self._value = self._fetch()
        return self._value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
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


# ------------------------------------------------------------------------------------------------ the hook


@dataclass
class _Pending:
    """A call whose output has not been exchanged."""

    owner: int
    tensors: list[torch.Tensor]
    """On the owner the output itself, elsewhere tensors of the same shapes without data."""
    is_done: bool = False


@dataclass
class CfgState:
    """What is known about the calls of one model."""

    branches: OrderedDict[Hashable, list[str]] = field(default_factory=OrderedDict)
    """By request, in the order in which they were first seen."""
    forms: dict[Any, Any] = field(default_factory=dict)
    """By the shapes of the inputs: an output, its tensors without data."""
    splits: dict[Any, bool] = field(default_factory=dict)
    """By the shapes of the inputs: whether such a batch can be split."""
    pending: list[_Pending] = field(default_factory=list)
    last_call: tuple[Hashable, int] = (None, -1)
    """Request and branch of the last call that was not computed on all ranks."""
    num_deferred: int = 0
    num_split: int = 0


class CfgParallelHook(ModelCallHook):
    """Lets each rank compute its own branches."""

    most_requests = 16

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__(self._split_or_defer)
        self.mesh = mesh
        self.state = CfgState()
        self._parameters: tuple[str, ...] = ()

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._parameters = tuple(parameters_of(module))
        return super().initialize_hook(module)

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self.state = CfgState()
        self.mesh.branches.agreed = None
        return module

    def _split_or_defer(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        size = self._batch_size(args, kwargs)
        if size is None or size < self.mesh.cfg.size or not self._can_split(module, size, args, kwargs):
            return self._one_branch(module, args, kwargs)
        self.state.num_split += 1
        with for_now(self.mesh.branches, splits_batch=True):
            return _split_batch(module, size, self.mesh.cfg, args, kwargs)

    # ---------------------------------------------------------------------------------------- one call per branch

    def _one_branch(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """This call's output, now or later."""
        branch = current_context().branch
        if branch is None:
            return self._on_all_ranks(module, args, kwargs)
        branches, signature = self._branches(), nested.signature((args, kwargs))
        is_new = branch not in branches
        if is_new:
            branches.append(branch)
        form = self.state.forms.get(signature)
        # All ranks compute a first step alike, so that none has one decision more to agree on than others.
        if is_new or form is None or len(branches) == 1:
            output = self._on_all_ranks(module, args, kwargs)
            self.state.forms[signature] = nested.without_data(output)
            return output
        index, size, here = branches.index(branch), self.mesh.cfg.size, self.mesh.cfg.index
        self._begin_call(index)
        # A rank without a branch computes one that another has, rather than nothing.
        computes = index % size == here or (here >= len(branches) and here % len(branches) == index)
        if computes:
            with for_now(self.mesh.branches, is_deferred=True):
                output = module(*args, **kwargs)
        else:
            device = next(nested.tensors((args, kwargs))).device
            output = nested.map_tensors(partial(torch.empty_like, device=device), form)
        pending = _Pending(index % size, list(nested.tensors(output)))
        self.state.pending.append(pending)
        self.state.num_deferred += not computes
        places = iter(range(len(pending.tensors)))
        return nested.map_tensors(
            lambda tensor: DeferredTensor(tensor, partial(self._fetch, pending, next(places))), output
        )

    def _on_all_ranks(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._end_step()
        return module(*args, **kwargs)

    def _begin_call(self, index: int) -> None:
        """A step begins with a call for a branch that was called before, or for another request."""
        request, last = current_context().request, self.state.last_call
        if request != last[0] or index <= last[1]:
            self._end_step()
        self.state.last_call = request, index

    def _end_step(self) -> None:
        """Forget what the ranks agreed on. All of them get here alike; first they exchange what is pending."""
        if self.state.pending:
            self._exchange()
        self.mesh.branches.agreed = None

    def _fetch(self, pending: _Pending, place: int) -> torch.Tensor:
        if not pending.is_done:
            self._exchange()
        return pending.tensors[place]

    def _exchange(self) -> None:
        """Send what this rank has computed since the last exchange, and get the rest."""
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
        """Number of items in the sample."""
        for name, value in (*zip(self._parameters, args, strict=False), *kwargs.items()):
            if role_by_name(name) != "conditioning":
                if isinstance(value, torch.Tensor) and value.ndim >= 2:
                    return value.shape[0]
                if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
                    return len(value)
        return None

    def _can_split(self, module: torch.nn.Module, size: int, args: Any, kwargs: Any) -> bool:
        """Whether all ranks get from parts of such a batch what they get from the whole. The trial is not a step of the
        run: it runs without other hooks, so that they keep nothing of it."""
        splits, signature, group = self.state.splits, nested.signature((args, kwargs)), self.mesh.cfg
        if signature not in splits:
            run = partial(self.call_original, module)
            whole, failed = run(*args, **kwargs), False
            try:
                with trial((args, kwargs)):
                    run(*_own_items(args, size, group), **_own_items(kwargs, size, group))
            except TrialFailed:
                failed = True
            splits[signature] = not group.max(float(failed), whole) and not group.difference(
                _split_batch(run, size, group, args, kwargs), whole
            )
        return splits[signature]


def _split_batch(run: Callable[..., Any], size: int, group: Group, args: Any, kwargs: Any) -> Any:
    output = run(*_own_items(args, size, group), **_own_items(kwargs, size, group))
    return _all_items(output, size, group)


def _own_items(value: Any, size: int, group: Group) -> Any:
    """This rank's part of a batch, wherever in a value it is."""
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
    """Whether a list holds tensors of whole batches, one per layer, say, rather than one per item."""
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
        return nested.map_tensors(gathered, value)

    return lists(output)


def apply_cfg_parallel(model: torch.nn.Module, mesh: ParallelMesh) -> Handle:
    """Spread the branches of a model over the ranks of the mesh; nothing is attached for a single one."""
    model = unwrapped(model)
    undo = contextlib.ExitStack()
    if mesh.cfg.size > 1:
        if HOOK in HookRegistry.get_or_create(model):
            raise HookConflictError(
                f"The branches of this {type(model).__name__} are on several ranks already. Call detach() on the "
                "handle of the first apply_cfg_parallel."
            )
        install_hook(undo, model, HOOK, CfgParallelHook(mesh))
    return Handle(undo)
