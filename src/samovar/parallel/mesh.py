"""The ranks that work on one image, which part of it each computes, and how they agree.

Ranks are laid out as cfg x ring x ulysses, the last one fastest: neighbouring ranks hold neighbouring tokens, and the
ranks of one branch are neighbours.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import SettingError, nearest
from ..core.settings import FLAG, Settings, count, setting
from .collectives import Group

StrategyName = Literal["gathered", "hybrid", "ring", "ulysses"]
_RANKS = count(1)._replace(expected="a number of ranks, 1 or more")


@dataclass(frozen=True)
class SequenceParallelConfig(Settings, param="parallel"):
    """How many ranks share one sequence and its CFG branches, and how they compute attention."""

    ulysses_degree: int = setting(1, _RANKS, "Ranks that exchange heads for tokens around each attention.")
    ring_degree: int = setting(1, _RANKS, "Ranks that pass keys and values around.")
    allgather_degree: int = setting(
        1, _RANKS, "Ranks that gather keys and values. Works with any attention; excludes Ulysses and ring."
    )
    convert_to_fp32: bool = setting(True, FLAG, "Whether a ring merges its parts in float32.")
    cfg_parallel_size: int = setting(1, _RANKS, "Ranks that share the branches of classifier-free guidance.")

    def check(self) -> None:
        if self.allgather_degree > 1 and self.ulysses_degree * self.ring_degree > 1:
            raise SettingError(
                f"allgather_degree={self.allgather_degree} cannot be combined with ulysses_degree="
                f"{self.ulysses_degree} and ring_degree={self.ring_degree}: once keys and values are gathered, there "
                "is nothing left for the other two to do. Set allgather_degree to 1, or both of the others.",
                param="allgather_degree",
            )

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that share one sequence."""
        return self.allgather_degree * self.ring_degree * self.ulysses_degree

    @property
    def num_ranks(self) -> int:
        """Number of ranks that work on one image."""
        return self.cfg_parallel_size * self.sequence_parallel_size

    @property
    def strategy(self) -> StrategyName:
        """The attention strategy that these degrees select."""
        if self.allgather_degree > 1:
            return "gathered"
        if self.ring_degree > 1:
            return "hybrid" if self.ulysses_degree > 1 else "ring"
        return "ulysses"

    @classmethod
    def from_name(cls, name: str, size: int | None = None) -> SequenceParallelConfig:
        """A strategy for this many ranks; by default for all that torchrun started, or for all GPUs."""
        size = size or int(os.environ.get("WORLD_SIZE", 0)) or torch.cuda.device_count()
        degrees: dict[str, dict[str, Any]] = {
            "gathered": {"allgather_degree": size},
            "hybrid": {"ulysses_degree": 2, "ring_degree": size // 2},
            "ring": {"ring_degree": size},
            "ulysses": {"ulysses_degree": size},
        }
        if name not in degrees:
            raise SettingError(f"parallel={name!r} is not a strategy. {nearest(name, degrees)}", param="parallel")
        if not size or (name == "hybrid" and (size < 4 or size % 2)):
            expected = "an even number of ranks, 4 or more" if name == "hybrid" else "at least one"
            raise SettingError(
                f"parallel={name!r} is for all ranks that torchrun started, or all GPUs, of which there are {size}; "
                f"expected {expected}. Give a number of ranks: parallel={{'ulysses_degree': 2}}.",
                param="parallel",
            )
        return cls(**degrees[name])


@dataclass
class BranchState:
    """How the running call relates to the ranks that compute other branches. `CfgParallelHook` updates it."""

    splits_batch: bool = False
    """Whether this rank computes some items of a batch, and other ranks the rest."""
    is_deferred: bool = False
    """Whether other ranks compute other branches meanwhile: the step makes one call per branch."""
    agreed: Tensor | None = None
    """The numbers agreed on for all deferred calls of this step; None if this rank has not asked yet."""
    may_ask: bool = False
    """Whether anything may ask: ranks with nothing to ask must then join those that do."""


@dataclass(frozen=True)
class ParallelMesh:
    """The groups that this rank belongs to."""

    cfg: Group
    """Ranks with the same tokens of other branches."""
    sequence: Group
    """Ranks with other tokens of the same branch."""
    ring: Group
    ulysses: Group
    branches: BranchState = field(compare=False, default_factory=BranchState)


_meshes: dict[tuple[int, int, int, int], ParallelMesh] = {}
"""Groups are made once: each holds connections until the world ends."""


def make_mesh(config: SequenceParallelConfig) -> ParallelMesh:
    """The mesh of a config over all ranks of the running world. Every rank must call this, in the same order."""
    rank, world = rank_and_world()
    if config.num_ranks != world:
        raise SettingError(
            f"These degrees need {config.num_ranks} ranks (cfg {config.cfg_parallel_size} x ring {config.ring_degree} "
            f"x ulysses {config.ulysses_degree} x allgather {config.allgather_degree}), but {world} "
            f"{'is' if world == 1 else 'are'} running. Start them with torchrun --nproc-per-node {config.num_ranks}, "
            f"or choose degrees whose product is {world}.",
            param="parallel",
        )
    shape = config.cfg_parallel_size, config.allgather_degree * config.ring_degree, config.ulysses_degree
    default = 0 if world == 1 else id(dist.group.WORLD)
    key = (default, *shape)
    if key not in _meshes:
        for known in [known for known in _meshes if known[0] != default]:  # Its world has ended.
            del _meshes[known]
        _meshes[key] = _new_mesh(shape, rank)
    return _meshes[key]


def join_world(timeout_s: float = 600.0, backend: str | None = None) -> int:
    """Become one of the ranks that torchrun has started, on one node or several; this process's rank."""
    if not dist.is_torchelastic_launched():
        raise SettingError(
            "This process was not started by torchrun. Start it with: torchrun --nproc-per-node 4 -m samovar generate "
            "..., or let samovar.Omni(model, parallel=...) start the ranks."
        )
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.get_rank()


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks running; 0 and 1 outside of torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _new_mesh(shape: tuple[int, int, int], rank: int) -> ParallelMesh:
    ranks = torch.arange(math.prod(shape)).reshape(shape)

    def group(*dims: int) -> Group:
        """This rank's group along some dimensions of the mesh. Every rank creates all groups."""
        rows = ranks.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, math.prod(shape[dim] for dim in dims))
        handles = [dist.new_group(row, timeout=_timeout()) if len(row) > 1 else None for row in rows.tolist()]
        place, index = (rows == rank).nonzero()[0].tolist()
        return Group(tuple(rows[place].tolist()), index, handles[place])

    return ParallelMesh(cfg=group(0), sequence=group(1, 2), ring=group(1), ulysses=group(2))


def _timeout() -> timedelta:
    """How long ranks of the world wait for each other; a new group would wait for half an hour."""
    world: Any = dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    timeout: timedelta = world._get_backend(device).options._timeout
    return timeout


class Agreement:
    """Turns this rank's statistics into those that a single rank would have seen, so that all ranks decide alike. Each
    rank sees its own tokens, or its own items of a batch, so statistics are summed. Pass one to a cache; every rank of
    the mesh must make one, or none."""

    num_figures = 4
    """How many numbers are exchanged, so that a rank that has none can join."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        mesh.branches.may_ask = True

    def __call__(self, figures: Tensor) -> Tensor:
        """Of branches in separate calls, the others follow the first. A rank asks once per step, however many branches
        it has; one that has not asked by the time outputs are exchanged joins there (`join`)."""
        state, figures = self._mesh.branches, self._mesh.sequence.sum(figures)
        if state.splits_batch:
            return self._mesh.cfg.sum(figures)
        if not state.is_deferred:
            return self._mesh.cfg.broadcast(figures, source=0)
        if state.agreed is None:
            state.agreed = self._mesh.cfg.broadcast(figures, source=0)
        return state.agreed

    def within_branch(self, figures: Tensor) -> Tensor:
        """For a decision that each branch makes for itself, whatever the first one does."""
        return self._mesh.sequence.sum(figures) if self._mesh.branches.is_deferred else self(figures)


def join(mesh: ParallelMesh, device: torch.device) -> None:
    """Take part in this step's agreement without statistics, as other ranks may wait for it. If the first rank has
    none, it has computed its branch or was not called: an infinite change makes the others compute, too."""
    state = mesh.branches
    if state.may_ask and state.agreed is None:
        state.agreed = mesh.cfg.broadcast(torch.full((Agreement.num_figures,), torch.inf, device=device), source=0)
