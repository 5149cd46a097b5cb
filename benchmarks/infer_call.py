"""Infer a call of a model that comes without a pipeline, by trying.

The names of a forward's parameters say what kind of tensor each is: latents, text, pooled text, a time, positions. How
wide each must be is asked of the model itself: every argument has a width that nothing else has, and the first layer
that refuses such a width says which one it wants. A forward on the meta device that returns the form of its sample ends
the search. How many pixels a latent covers is in no model: 8 a side, and 4 frames, as with most VAEs.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samovar.arch.modules import parameters_of, unwrapped
from samovar.core import nested
from samovar.trace.rehearse import CallForm, Rehearsal, RequestSize, quiet
from samovar.trace.shadow import TrialFailed, trial
from samovar.trace.weightless import running_weightless, weightless_twin

_PIXELS, _FRAMES = 8, 4
"""Pixels and frames of one latent."""
_IMAGE, _VIDEO, _NUM_FRAMES = (1024, 1024), (480, 832), 81
"""Sizes where nothing says another."""
_TEXT = 512
"""Tokens of the prompt."""
_MOST_SECONDS, _MOST_WIDTHS = 20.0, 12
_FIRST_WIDTH = 100_003
_KINDS = {
    "time": r"t|sigmas?|timesteps?|\w*_time",
    "other_time": r"r_timestep|timestep_r",
    "each": r"guidance",
    "label": r"class_labels?|style",
    "mask": r"\w*mask\w*",
    "positions": r"img_ids|image_ids",
    "text_positions": r"txt_ids|text_ids",
    "all_positions": r"position_ids",
    "shapes": r"img_shapes",
    "pair": r"target_size|original_size|crop_coords",
    "pooled": r"\w*pooled\w*|global_hidden_states|proj_embedding",
    "count": r"num_frames|height|width|fps",
    "lengths": r"text_lens|txt_seq_lens",
    "text": r"encoder_hidden_states\w*|\w*text\w*|cap_feats|\w*embeds",
}
"""What a parameter is, by the first pattern that its name matches."""
_CORE = ("time", "text_positions", "positions", "all_positions", "shapes", "each", "count")
"""Optional arguments that are given from the start, with text and pooled text of these names."""
_CORE_NAMES = ("encoder_hidden_states", "pooled_projections")


class _OtherWidth(Exception):
    """A layer wants another width of what came from an argument."""

    def __init__(self, width: int, wanted: int) -> None:
        super().__init__(f"a layer wants a width of {wanted}")
        self.width, self.wanted = width, wanted


class _Widths(TorchFunctionMode):
    """Looks at what reaches layers that take one width."""

    def __init__(self, open_widths: Sequence[int]) -> None:
        self._open = open_widths
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        read = _WANTED.get(func)
        if read is not None:
            width, wanted = read(*args, **(kwargs or {}))
            for known in self._open if width != wanted > 1 else ():
                patch = width // known  # A patch of latents may have become channels.
                if width == patch * known and patch and wanted % patch == 0:
                    raise _OtherWidth(known, wanted // patch)
        return func(*args, **(kwargs or {}))


def _last(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> tuple[int, int]:
    return input.shape[-1], weight.shape[1]


def _channels(input: torch.Tensor, weight: torch.Tensor, *rest: Any, groups: int = 1, **__: Any) -> tuple[int, int]:
    return input.shape[-weight.ndim + 1], weight.shape[1] * (rest[4] if len(rest) > 4 else groups)


def _normal(input: torch.Tensor, normalized_shape: Sequence[int], *_: Any, **__: Any) -> tuple[int, int]:
    return input.shape[-1], normalized_shape[-1]


def _scale(input: Any, other: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """Of a product with weights: some norms are written out."""
    pair = [value.shape[-1] for value in (input, other) if isinstance(value, torch.Tensor) and value.ndim]
    return (max(pair), min(pair)) if len(pair) == 2 else (1, 1)


_WANTED: dict[Any, Callable[..., tuple[int, int]]] = {
    functional.linear: _last, functional.conv1d: _channels, functional.conv2d: _channels, functional.conv3d: _channels,
    torch.conv1d: _channels, torch.conv2d: _channels, torch.conv3d: _channels,
    functional.layer_norm: _normal, functional.rms_norm: _normal,
    torch.Tensor.mul: _scale, torch.Tensor.__mul__: _scale, torch.mul: _scale,
}  # fmt: skip


@dataclass
class _Search:
    """One form of the sample, and the widths that are known so far."""

    model: torch.nn.Module
    size: RequestSize
    layout: str
    """The sample's axes: b(atch), c(hannels), f(rames), h(eight), w(idth), n (tokens)."""
    factor: int
    """How many latents a side make one token."""
    widths: dict[str, int] = field(default_factory=dict)
    num_calls: int = 0
    """How far a forward came."""
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        config = getattr(self.model, "config", {})
        height, width = self._side("height", config), self._side("width", config)
        self.batch = self.size.batch or 1
        self.height, self.width = max(height // self.factor, 1), max(width // self.factor, 1)
        frames = self.size.frames or _entry(config, r"sample_frames|video_length") or _NUM_FRAMES
        is_cut = self.size.frames is not None or not _entry(config, r"video_length")
        self.frames = ((frames - 1) // _FRAMES + 1 if is_cut else frames) if self.is_video else 1
        self.tokens = self.frames * self.height * self.width
        if self.layout == "bcn":  # A sound, whose size is its length.
            self.tokens = _entry(config, r"sample_size") or self.tokens
        self.text = _entry(config, r"(?!rope)\w*(?:text|seq)\w*_len(?:gth)?") or _TEXT
        axes = next((config[name] for name in ("axes_dims_rope", "axes_dims", "axes_dim") if name in config), (1, 1, 1))
        self.axes = len(axes) if isinstance(axes, (list, tuple)) else 3
        if type(config.get("in_channels")) is int:
            self.widths["sample"] = config["in_channels"]

    def _side(self, name: str, config: Mapping[str, Any]) -> int:
        """Latents along a side."""
        asked = getattr(self.size, name) or self.size.height or self.size.width
        default = dict(zip(("height", "width"), _VIDEO if self.is_video else _IMAGE, strict=True))[name] // _PIXELS
        return asked // _PIXELS if asked else _entry(config, f"sample_{name}|sample_size") or default

    @property
    def is_video(self) -> bool:
        return "f" in self.layout or "num_frames" in parameters_of(self.model)

    @property
    def made(self) -> RequestSize:
        """The size in pixels."""
        side = self.factor * _PIXELS
        frames = (self.frames - 1) * _FRAMES + 1 if self.is_video else None
        return RequestSize(self.height * side, self.width * side, frames, self.batch)

    def width_of(self, name: str) -> int:
        return self.widths.setdefault(name, _FIRST_WIDTH + 2 * len(self.widths))

    def sample(self) -> Any:
        sizes = {"b": self.batch, "c": self.width_of("sample"), "f": self.frames, "n": self.tokens,
                 "h": self.height, "w": self.width, "1": 1}  # fmt: skip
        shape = [sizes[axis] for axis in self.layout.strip("[]")]
        tensor = torch.empty(shape, dtype=self._dtype(), device="meta")
        return [tensor] * self.batch if self.layout.startswith("[") else tensor

    def value(self, name: str, kind: str) -> Any:
        """An argument."""
        batch, in_list = self.batch, self.layout.startswith("[")
        if kind == "text":
            shape = (self.text, self.width_of(name)) if in_list else (batch, self.text, self.width_of(name))
            text = torch.empty(shape, dtype=self._dtype(), device="meta")
            return [text] * batch if in_list else text
        simple: dict[str, Callable[[], Any]] = {
            "time": lambda: torch.full((batch,), 500.0), "other_time": lambda: torch.full((batch,), 500.0),
            "each": lambda: torch.ones(batch),
            "label": lambda: torch.zeros(batch, dtype=torch.long),
            "mask": lambda: torch.ones(batch, self.text, dtype=torch.bool),
            "positions": lambda: torch.zeros(self.tokens, self.axes),
            "text_positions": lambda: torch.zeros(self.text, self.axes),
            "all_positions": lambda: torch.zeros(self.text + self.tokens, self.axes),
            "shapes": lambda: [[(self.frames, self.height, self.width)]] * batch,
            "pair": lambda: torch.ones(batch, 2), "lengths": lambda: torch.full((batch,), self.text),
            "pooled": lambda: torch.empty(batch, self.width_of(name), dtype=self._dtype(), device="meta"),
            "count": lambda: {"num_frames": self.frames, "height": self.height, "width": self.width}.get(name, 24),
        }  # fmt: skip
        return simple[kind]()

    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)


def _entry(config: Mapping[str, Any], pattern: str) -> int | None:
    """The first whole number among settings of such a name."""
    return next((v for name, v in config.items() if re.fullmatch(pattern, name) and type(v) is int), None)


def infer_call(model: torch.nn.Module, size: RequestSize | None = None, name: str = "transformer") -> Rehearsal:
    """A call of a model that runs, and the memory that it needs beside its weights; `problem` if none is found."""
    bare, size = unwrapped(model), size or RequestSize()
    problem, farthest, deadline = "no form of its arguments was tried", -1, time.monotonic() + _MOST_SECONDS
    try:
        with trial(()):
            twin = weightless_twin(bare)
    except TrialFailed as error:
        return Rehearsal(problem=str(error))
    for layout, given in itertools.product(_layouts(bare), _choices(bare)):
        search = _Search(twin, size, *layout)
        found = _run(search, given)
        if isinstance(found, CallForm):
            return Rehearsal({name: found}, {name: search.peak_bytes}, search.made)
        if search.num_calls > farthest:
            problem, farthest = found, search.num_calls
        if time.monotonic() > deadline:
            break
    return Rehearsal(problem=f"no call of {type(bare).__name__} was found: {problem}")


def _run(search: _Search, given: Mapping[str, str]) -> CallForm | str:
    """A call with these arguments, or why there is none."""
    first = next(iter(parameters_of(search.model)))
    for _ in range(_MOST_WIDTHS):
        sample = search.sample()
        kwargs = {first: sample} | {name: search.value(name, kind) for name, kind in given.items()}
        widths = _Widths([width for width in search.widths.values() if width >= _FIRST_WIDTH])
        try:
            with trial(()), quiet(), torch.compiler.set_stance("force_eager"), running_weightless() as mode, widths:
                output = search.model(**nested.map_tensors(lambda tensor: tensor, kwargs))
                search.peak_bytes = mode.peak_bytes
        except TrialFailed as error:
            search.num_calls = max(search.num_calls, widths.num_calls)
            if not isinstance(error.__cause__, _OtherWidth):
                return str(error).splitlines()[0]
            wrong = error.__cause__
            key = next(name for name, width in search.widths.items() if width == wrong.width)
            search.widths[key] = wrong.wanted
            continue
        unused = [name for name, width in search.widths.items() if width >= _FIRST_WIDTH]
        if "sample" not in unused and _is_alike(sample, output, search.layout):
            return CallForm((), {name: value for name, value in kwargs.items() if name not in unused})
        return "it returns another form than that of its sample"
    return "too many widths are unknown"


def _is_alike(sample: Any, output: Any, layout: str) -> bool:
    """Whether an output has the form of the sample but for its channels."""
    one, other = next(nested.tensors(sample)), next(nested.tensors(output), None)
    channels = layout.strip("[]").index("c")
    return other is not None and one.ndim == other.ndim and all(
        size == same for axis, (size, same) in enumerate(zip(one.shape, other.shape, strict=True)) if axis != channels
    )  # fmt: skip


def _layouts(model: torch.nn.Module) -> list[tuple[str, int]]:
    """Forms of the sample to try: that which the first layer with many inputs suggests, then all."""
    layouts = [("bnc", 2), ("bchw", 1), ("bcfhw", 1), ("bfchw", 1), ("bfhwc", 1), ("[c1hw]", 1), ("bnc", 4), ("bcn", 2)]
    takes = parameters_of(model)
    convolutions = [m for m in model.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Conv3d))]
    if not {"img_ids", "img_shapes"} & set(takes) and convolutions:
        wanted = "bcfhw" if isinstance(convolutions[0], torch.nn.Conv3d) else "bchw"
        layouts.sort(key=lambda item: item[0] != wanted)
    if "num_frames" in takes:
        layouts.sort(key=lambda item: item != ("bnc", 4))
    return layouts


def _choices(model: torch.nn.Module) -> Iterator[dict[str, str]]:
    """Which arguments to give, by name and kind: the usual ones, and then more or fewer of those with a default."""
    parameters = [p for p in list(parameters_of(model).values())[1:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    kinds = {p.name: kind for p in parameters if (kind := _kind(p.name)) is not None}
    needed = {p.name: kinds.get(p.name, "text") for p in parameters if p.default is p.empty}
    core = {n: k for n, k in kinds.items() if n not in needed and (k in _CORE or n in _CORE_NAMES)}
    extra = {n: k for n, k in kinds.items() if n not in needed and n not in core}
    usual = needed | core
    choices = [usual, {n: k for n, k in usual.items() if k != "each" or n in needed}]
    choices += [choices[1] | {n: k for n, k in extra.items() if k in ("text", "mask", "pooled")}]
    choices += [choices[1] | {n: k} for n, k in extra.items()]
    choices += [choices[1] | extra, needed]
    yield from (choice for index, choice in enumerate(choices) if choice not in choices[:index])


def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if re.fullmatch(pattern, name)), None)
