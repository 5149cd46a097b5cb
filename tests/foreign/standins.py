"""Takes the place of packages that are not installed, and that matter only for training or on a GPU.

Most are shells: whatever is asked of them is an empty class. Those that a forward calls compute what they are named
after, by torch. A package that is installed is never replaced, and model code has no stand-in.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

SHELLS = (
    "colossalai", "datasets", "ema_pytorch", "fairscale", "k_diffusion", "librosa", "mmcv", "mmengine", "omegaconf",
    "pypinyin", "rjieba", "tensornvme", "torchaudio", "torchdiffeq", "torchvision", "wandb", "xformers",
)  # fmt: skip
"""Of these nothing is used by a forward."""


SUBMODULES = ("transforms", "functional", "ops", "fmha")
"""These names are modules, of whichever package."""


class _Shell(ModuleType):
    """A module of which anything can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in SUBMODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        made = type(name, (_Nothing,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing(metaclass=_Meta):
    """A class, a function or a decorator: whatever is wanted at import."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        is_decorator = cls.__bases__ == (_Nothing,) and len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if is_decorator else super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class Finder:
    """Finds what nobody else has found. It is the last on `sys.meta_path`, and there only inside a world."""

    def __init__(self, needs: tuple[str, ...] = ()) -> None:
        self._names = {*SHELLS, *WORKING} - {*OPTIONAL} | {*needs}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._names:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        top = spec.name.partition(".")[0]
        module = _Shell(spec.name) if top in SHELLS else ModuleType(spec.name)
        module.__dict__["__version__"] = "0"
        module.__dict__.update(WORKING.get(top, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)


def is_stand_in(module: ModuleType) -> bool:
    """Whether a module was made here."""
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), Finder)


# ------------------------------------------------------------------------------------------------ those that work


def _attention(q: Any, k: Any, v: Any, dropout: float, scale: float | None, causal: bool) -> torch.Tensor:
    """Of (batch, tokens, heads, channels), with fewer heads of keys if they are shared."""
    q, k, v = (value.transpose(1, 2) for value in (q, k, v))
    shared = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale, is_causal=causal, enable_gqa=shared)
    return out.transpose(1, 2)


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, **_: Any
) -> torch.Tensor:
    return _attention(q, k, v, dropout_p, softmax_scale, causal)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Sequences of several lengths, one after another in one tensor of (tokens, heads, channels)."""
    out = torch.zeros_like(q)
    ends, key_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for start, end, key_start, key_end in zip(ends, ends[1:], key_ends, key_ends[1:], strict=False):
        if end > start:
            parts = q[None, start:end], k[None, key_start:key_end], v[None, key_start:key_end]
            out[start:end] = _attention(*parts, dropout_p, softmax_scale, causal)[0]
    return out


def unpad_input(states: Any, mask: Any) -> tuple[Any, ...]:
    """The tokens under a mask, one after another; which they are, and where each sequence begins."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return states.flatten(0, 1)[indices], indices, starts, int(lengths.max()), lengths


def pad_input(states: Any, indices: Any, batch: int, tokens: int) -> torch.Tensor:
    """The way back from `unpad_input`."""
    out = states.new_zeros(batch * tokens, *states.shape[1:])
    out[indices] = states
    return out.unflatten(0, (batch, tokens))


def index_first_axis(states: Any, indices: Any) -> Any:
    return states[indices]


_Interpolation = enum.Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS NEAREST_EXACT")


def _resize(image: Any, size: list[int], **_: Any) -> torch.Tensor:
    return torch.nn.functional.interpolate(image, size)


class _Function:
    """Something with `apply`, as an autograd function has."""

    def __init__(self, apply: Callable[..., Any]) -> None:
        self.apply = apply


def _rms_norm(x: Any, weight: Any, eps: float, offset: float = 0.0, *_: Any) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + offset, eps)


def _rope(q: Any, k: Any, cos: Any, sin: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of (batch, heads, tokens, channels), whose halves are turned; of the angles the first half counts."""
    cos, sin = (value[..., : q.shape[-1] // 2].unsqueeze(1) for value in (cos, sin))

    def turn(x: Any) -> torch.Tensor:
        one, other = x.chunk(2, dim=-1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)

    return turn(q), turn(k)


def memory_efficient_attention(
    q: Any, k: Any, v: Any, attn_bias: Any = None, p: float = 0.0, scale: float | None = None
) -> torch.Tensor:
    """Of (batch, tokens, heads, channels); a mask of blocks keeps sequences that share a batch apart."""
    if not isinstance(attn_bias, BlockDiagonalMask):
        return _attention(q, k, v, p, scale, False)
    parts = [value.split(lengths, dim=1) for value, lengths in zip((q, k, v), attn_bias.lengths, strict=True)]
    return torch.cat([_attention(*part, p, scale, False) for part in zip(*parts, strict=True)], dim=1)


class BlockDiagonalMask:
    """Tokens of a sequence attend to those of their own."""

    def __init__(self, queries: list[int], keys: list[int]) -> None:
        self.lengths = queries, keys, keys

    @classmethod
    def from_seqlens(cls, queries: list[int], keys: list[int] | None = None) -> BlockDiagonalMask:
        return cls(queries, keys or queries)


WORKING: Mapping[str, Mapping[str, Any]] = {
    "flash_attn": {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "unpad_input": unpad_input,
        "pad_input": pad_input,
        "index_first_axis": index_first_axis,
        "_flash_attn_forward": None,
        "_flash_attn_backward": None,
    },
    "torchvision": {"InterpolationMode": _Interpolation, "resize": _resize},
    "xformers": {"memory_efficient_attention": memory_efficient_attention, "BlockDiagonalMask": BlockDiagonalMask},
    "liger_kernel": {"LigerRMSNormFunction": _Function(_rms_norm), "LigerRopeFunction": _Function(_rope)},
}
"""What a forward calls. Every module of such a package has all of it."""

OPTIONAL = ("xformers",)
"""Some models do without these if they are not there; so they are there only where a case needs them."""
