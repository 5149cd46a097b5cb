"""Which ranks work on the same picture, and on which part of it?

Ranks are laid out as cfg x ring x ulysses, the last one fastest: ranks next to each other hold tokens next to
each other, and the ranks of one branch are next to each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from ..errors import SettingError, nearest
from .collectives import Group, Traffic

StrategyName = Literal["auto", "gathered", "hybrid", "ring", "ulysses"]


@dataclass(frozen=True)
class SequenceParallelConfig:
    """How many ranks share one sequence, and how their attention is computed."""

    ulysses_degree: int = 1
    """Ranks that exchange heads for tokens around each attention."""
    ring_degree: int = 1
    """Ranks that pass keys and values round."""
    allgather_degree: int = 1
    """Ranks that gather keys and values: works with any attention, and excludes the other two."""
    cfg_parallel_size: int = 1
    """Ranks that share the CFG branches."""
    convert_to_fp32: bool = True
    """Whether parts of a ring are merged in float32."""

    def __post_init__(self) -> None:
        for item in fields(self)[:4]:
            degree = getattr(self, item.name)
            if type(degree) is not int or degree < 1:
                raise SettingError(f"{item.name} is {degree!r}; a number of ranks from 1 on was expected.")
        if self.allgather_degree > 1 and self.ulysses_degree * self.ring_degree > 1:
            raise SettingError(
                f"allgather_degree={self.allgather_degree} cannot be used with ulysses_degree={self.ulysses_degree} "
                f"and ring_degree={self.ring_degree}: gathered keys and values leave nothing to the other two. "
                "Set it to 1, or both of them."
            )

    @property
    def sequence_parallel_size(self) -> int:
        """How many ranks share one sequence."""
        return self.allgather_degree * self.ring_degree * self.ulysses_degree

    @property
    def num_ranks(self) -> int:
        """Number of ranks that compute one image."""
        return self.cfg_parallel_size * self.sequence_parallel_size

    @property
    def strategy(self) -> StrategyName:
        """The attention that these degrees ask for."""
        if self.allgather_degree > 1:
            return "gathered"
        if self.ring_degree > 1:
            return "hybrid" if self.ulysses_degree > 1 else "ring"
        return "ulysses"

    @classmethod
    def of_strategy(cls, strategy: str, size: int, num_heads: int | None = None) -> SequenceParallelConfig:
        """The degrees for a strategy by name. "auto" takes Ulysses, which sends least, if there are heads enough."""
        if strategy == "auto":
            strategy = "ulysses" if num_heads is None or num_heads >= size else "gathered"
        if strategy == "gathered":
            return cls(allgather_degree=size)
        if strategy == "ulysses":
            return cls(ulysses_degree=size)
        if strategy == "ring":
            return cls(ring_degree=size)
        if strategy == "hybrid":
            if size < 4 or size % 2:
                raise SettingError(f"A hybrid of Ulysses and ring needs an even number of ranks from 4 on, not {size}.")
            return cls(ulysses_degree=2, ring_degree=size // 2)
        raise SettingError(f"There is no strategy {strategy!r}. {nearest(strategy, get_args(StrategyName))}")


@dataclass
class BranchState:
    """What the running call is to the ranks that compute other branches. `CfgParallelHook` keeps it."""

    splits_batch: bool = False
    """Whether it is a part of a batch whose other items are on other ranks."""
    is_deferred: bool = False
    """Whether other ranks compute other branches meanwhile: one of several calls of one step."""
    agreed: torch.Tensor | None = None
    """What the ranks have agreed on for all deferred calls of this step; None if this rank has not asked yet."""
    may_ask: bool = False
    """Whether anything may ask: ranks that have nothing to ask must then join those that have."""


@dataclass(frozen=True)
class ParallelMesh:
    """The groups that this rank is part of."""

    cfg: Group
    """The ranks with the same tokens of other branches."""
    sequence: Group
    """The ranks with other tokens of the same branch."""
    ring: Group
    ulysses: Group
    traffic: Traffic = field(compare=False)
    branches: BranchState = field(compare=False, default_factory=BranchState)

    @property
    def size(self) -> int:
        return self.cfg.size * self.sequence.size


_meshes: dict[tuple[int, int, int, int], ParallelMesh] = {}
"""Groups are made once: each holds connections, and none is ever given back before the world ends."""


def make_mesh(config: SequenceParallelConfig, cfg_degree: int = 1) -> ParallelMesh:
    """The mesh of a config over all ranks of the running world. Every rank must call this, in the same order."""
    shape = cfg_degree, config.allgather_degree * config.ring_degree, config.ulysses_degree
    size = cfg_degree * config.sequence_parallel_size
    rank, world = _rank_and_world()
    if type(cfg_degree) is not int or cfg_degree < 1:
        raise SettingError(f"cfg_degree is {cfg_degree!r}; a number of ranks from 1 on was expected.")
    if size != world:
        raise SettingError(
            f"These degrees need {size} ranks (cfg {cfg_degree} x ring {config.ring_degree} x ulysses "
            f"{config.ulysses_degree} x allgather {config.allgather_degree}), but {world} "
            f"{'is' if world == 1 else 'are'} running. Start {size}, or choose degrees whose product is {world}."
        )
    default = 0 if world == 1 else id(dist.group.WORLD)
    key = (default, *shape)
    if key not in _meshes:
        for known in [known for known in _meshes if known[0] != default]:  # Of a world that has ended.
            del _meshes[known]
        _meshes[key] = _new_mesh(shape, rank)
    return _meshes[key]


class Agreement:
    """For a decision that all ranks must make alike: this rank's figures in, those that a single rank would have
    seen out. Each rank sees its own tokens, or its own items of a batch, so figures are added up."""

    num_figures = 4
    """That are exchanged, so that a rank that has none can join."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        mesh.branches.may_ask = True

    def __call__(self, figures: torch.Tensor) -> torch.Tensor:
        """Of branches that are calls of their own, the others follow the first one. A rank asks once in a step,
        however many of them it has; one that has not asked when outputs are exchanged joins there (`join`)."""
        state, figures = self._mesh.branches, self._mesh.sequence.sum(figures)
        if state.splits_batch:
            return self._mesh.cfg.sum(figures)
        if not state.is_deferred:
            return self._mesh.cfg.broadcast(figures, source=0)
        if state.agreed is None:
            state.agreed = self._mesh.cfg.broadcast(figures, source=0)
        return state.agreed

    def within_branch(self, figures: torch.Tensor) -> torch.Tensor:
        """For a decision that each branch makes for itself, whatever the first one does."""
        if self._mesh.branches.is_deferred:
            return self._mesh.sequence.sum(figures)
        return self(figures)


def join(mesh: ParallelMesh, device: torch.device) -> None:
    """Take part in this step's agreement without figures, as other ranks may wait for that. If it is the first rank
    that has none, it has computed its branch or was not called: an infinite change lets the others compute, too."""
    state = mesh.branches
    if state.may_ask and state.agreed is None:
        state.agreed = mesh.cfg.broadcast(torch.full((Agreement.num_figures,), torch.inf, device=device), source=0)


def agreement(mesh: ParallelMesh) -> Agreement:
    """What a cache asks, so that all ranks of the mesh decide alike. Every rank must make one, or none."""
    return Agreement(mesh)


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _new_mesh(shape: tuple[int, int, int], rank: int) -> ParallelMesh:
    ranks = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape)
    traffic = Traffic()

    def group(*dims: int) -> Group:
        """This rank's group along some dimensions of the mesh; all ranks make the groups of all."""
        others = [dim for dim in range(3) if dim not in dims]
        rows = ranks.permute(*others, *dims).flatten(len(others)).reshape(-1, math.prod(shape[dim] for dim in dims))
        own: Group | None = None
        for row in rows.tolist():
            handle = dist.new_group(row, timeout=_timeout()) if len(row) > 1 else None
            if rank in row:
                own = Group(tuple(row), row.index(rank), handle, traffic)
        assert own is not None
        return own

    return ParallelMesh(cfg=group(0), sequence=group(1, 2), ring=group(1), ulysses=group(2), traffic=traffic)


def _timeout() -> timedelta:
    """How long ranks of the world wait for each other; a new group would wait for half an hour."""
    world: Any = dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    timeout: timedelta = world._get_backend(device).options._timeout
    return timeout
