"""What a pipeline takes and makes: known once it is loaded, and small enough to send to other processes."""

from __future__ import annotations

import math
import random
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..arch.calls import call_parameters
from ..compose.explain import Explanation
from ..core.errors import SettingError, nearest
from ..core.files import brief
from ..media import upright_size
from .inputs import Inputs, find_inputs
from .outputs import END, START, OutputKind, find_output
from .request import OmniDiffusionSamplingParams, Request

_NOT_ARGUMENTS = ("seed", "num_outputs_per_prompt", "num_frames", "fps", "seconds")
"""Each output has its own generator and its own call; the rest has other names in pipelines."""
_OURS = frozenset({"prompt", "generator", "return_dict", "output_type", "callback",
                   "callback_steps", "callback_on_step_end", "callback_on_step_end_tensor_inputs"})  # fmt: skip
"""Arguments that the engine gives itself."""
_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class PipelineFacts:
    """What a pipeline takes, and what it makes."""

    class_name: str
    takes: frozenset[str]
    """The names of its arguments."""
    multiple: int
    """Height and width must be multiples of this."""
    defaults: OmniDiffusionSamplingParams = field(default_factory=OmniDiffusionSamplingParams)
    scheduled_steps: int | None = None
    """Number of steps of every request, if the cache has a schedule."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that a request may use."""
    has_tolerance: bool = False
    """Whether requests may say how much the cache may lose."""
    explanation: Explanation | None = None
    """What is on the pipeline, and why."""
    output: OutputKind = field(default_factory=OutputKind)
    inputs: Inputs = field(default_factory=Inputs)
    needs: tuple[str, ...] = ()
    """Arguments without a default."""
    types: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    """The types of arguments that take plain values."""
    size: tuple[int, int] | None = None
    """The height and width that the pipeline takes by default."""
    ignores_guidance: bool = False
    """Whether guidance_scale has no effect."""
    max_side: int | None = None
    """In pixels, if the model has a limit."""
    max_frames: int | None = None

    @property
    def can_edit(self) -> bool:
        """Whether an image can be given, as such or as the only one that guides the model."""
        return self.inputs.takes_image

    @property
    def takes_prompt(self) -> bool:
        return "prompt" in self.takes

    def check(self, request: Request) -> Request:
        """The request as it will run: its parameters complete, its seed drawn, and the pipeline's arguments with it.
        SettingError if the pipeline does not take something, or lacks something."""
        if request.arguments is not None:
            return request
        if request.prompt and not self.takes_prompt:
            raise SettingError(f"{self.class_name} takes no prompt. Leave it empty.", param="prompt")
        inputs = self.inputs.prepared(request.given_inputs, self.class_name, self.output.rate)
        params = self.completed(request)
        self.check_size(params)
        self._check_features(request, params)
        call = self._arguments(request, params) | inputs
        for name in self.needs:
            if name not in call:
                raise SettingError(f"{self.class_name} needs {name}. Give it by its name.", param=name)
        notes = self.output.notes
        if request.params.guidance_scale is not None and self.ignores_guidance:
            effect = "guidance_scale has no effect: the model has no guidance embedding; use true_cfg_scale"
            notes = (effect, *notes)
        seed = random.randrange(2**32) if params.seed is None else params.seed
        return replace(request, params=replace(params, seed=seed), arguments=call, notes=notes)

    def check_size(self, params: OmniDiffusionSamplingParams) -> None:
        """Refuse sides and lengths that the model cannot make."""
        for name in ("height", "width"):
            size = getattr(params, name)
            if size is not None and size % self.multiple:
                near = sorted({self._rounded(size), self._rounded(size + self.multiple)})
                message = f"{name} must be a multiple of {self.multiple} for this model, not {size}: try "
                raise SettingError(f"{message}{' or '.join(map(str, near))}.", param=name)
            if size is not None and self.max_side is not None and size > self.max_side:
                raise SettingError(f"{name} must be at most {self.max_side} for this model, not {size}.", param=name)
        frames = self.num_frames(params)
        if self.max_frames is not None and frames > self.max_frames:
            message = f"This model makes at most {self.max_frames} frames, not {frames}. Ask for fewer."
            raise SettingError(message, param="num_frames" if params.seconds is None else "seconds")

    def _check_features(self, request: Request, params: OmniDiffusionSamplingParams) -> None:
        """Refuse what the cache and the adapters of this engine have no place for."""
        if not request.exact and self.scheduled_steps not in (None, params.num_inference_steps):
            raise SettingError(
                f"num_inference_steps={params.num_inference_steps}, but the cache has a schedule for "
                f"{self.scheduled_steps} steps. Leave it out, or compute every step with exact=True.",
                param="num_inference_steps",
            )
        if request.tolerance is not None and not self.has_tolerance:
            message = "A tolerance is for the cache 'auto', and this engine has another or none. Choose cache='auto'."
            raise SettingError(message, param="tolerance")
        for name in (adapter.name for adapter in request.lora):
            if name not in self.adapters:
                hint = nearest(name, self.adapters) if self.adapters else "None is registered: see the setting lora."
                raise SettingError(f"lora: {brief(name)} is not a registered adapter. {hint}", param="lora")

    def completed(self, request: Request) -> OmniDiffusionSamplingParams:
        """The request's settings over the model's defaults. An image to edit sets the size, or the aspect ratio if one
        side is given; of a video it sets the aspect ratio alone."""
        asked, params = request.params, request.params.over(self.defaults)
        if not request.images or not self.can_edit or not {"height", "width"} <= self.takes:
            return params
        wide, high = upright_size(request.images[0])
        if asked.width is asked.height is None and self.output.kind != "image":
            pixels = (params.width or 0) * (params.height or 0) or math.prod(self.size or (0,))
            if not pixels:
                return params
            scale = math.sqrt(pixels / (wide * high))
            wide, high = round(wide * scale), round(high * scale)
        width = asked.width or self._rounded(wide * (asked.height or high) // high)
        height = asked.height or self._rounded(high * (asked.width or wide) // wide)
        return replace(params, height=height, width=width)

    def fps(self, params: OmniDiffusionSamplingParams) -> float | None:
        """Frames per second of a video with these settings."""
        return params.fps or self.defaults.fps or self.output.fps

    def num_frames(self, params: OmniDiffusionSamplingParams) -> int:
        """Frames of a video with these settings; 1 for other outputs."""
        return self._length(params).get(self.output.frames_argument or "") or self.output.frames or 1

    def _length(self, params: OmniDiffusionSamplingParams) -> dict[str, Any]:
        """The arguments that say how long a video or a sound is."""
        output, frames = self.output, self.output.frames_argument
        taken = {"num_frames": frames, "seconds": frames or output.duration_argument, "fps": output.kind == "video"}
        for name, is_taken in taken.items():
            if getattr(params, name) is not None and not is_taken:
                message = f"{self.class_name} makes {output} of its own length, and takes no {name}."
                raise SettingError(message, param=name)
        call: dict[str | None, Any] = {output.fps_argument or "fps": params.fps, frames: params.num_frames}
        if params.seconds is not None and frames:
            call[frames] = output.frames_in(params.seconds, self.fps(params) or 1.0)
        elif params.seconds is not None:
            start = params.options.get(START, 0.0) if output.duration_argument == END else 0.0
            call[output.duration_argument] = params.seconds + start
        return {name: value for name, value in call.items() if name in self.takes and value is not None}

    def _arguments(self, request: Request, params: OmniDiffusionSamplingParams) -> dict[str, Any]:
        """The pipeline's arguments but its inputs."""
        given = {name: value for name, value in params.given().items() if name not in _NOT_ARGUMENTS}
        call = {**given, **params.options}
        for name, value in call.items():
            self._check_argument(name, value)
        if "max_area" in self.takes and params.height and params.width:  # Else it would be another size, of this area.
            given["max_area"] = params.height * params.width
        if "_auto_resize" in self.takes and any(image.width * image.height < 2**20 for image in request.images):
            given["_auto_resize"] = False  # Else it would be enlarged to a megapixel.
        return given | self._length(params) | call

    def _check_argument(self, name: str, value: Any) -> None:
        allowed = self.types.get(name, ())
        is_float = float in allowed and type(value) is int
        if name in _COUNTS:
            problem = f"Use num_outputs_per_prompt instead of {name}: each output has its own seed."
        elif name in _OURS:
            problem = f"{name} is for the engine to set. Leave it out{'; give seed' if name == 'generator' else ''}."
        elif name not in self.takes:
            problem = f"{self.class_name} does not take {name}. {nearest(name, self.takes - _OURS - {*_COUNTS})}"
        elif allowed and value is not None and not is_float and type(value) not in allowed:
            problem = f"{name} must be {' or '.join(_PLAIN[each] for each in allowed)}, not {brief(value)}."
        else:
            return
        raise SettingError(problem, param=name)

    def _rounded(self, side: int) -> int:
        return max(self.multiple, side // self.multiple * self.multiple)


def facts_of(pipeline: Any, defaults: OmniDiffusionSamplingParams) -> PipelineFacts:
    """The facts of a loaded pipeline."""
    cls = type(pipeline)
    parameters, inputs, output = call_parameters(cls), find_inputs(cls), find_output(pipeline)
    sides: list[Any] = [parameters[name].default if name in parameters else None for name in ("height", "width")]
    config, multiple = _config(pipeline, "transformer"), _size_multiple(pipeline)
    positions = config.get("rope_max_seq_len")  # Tokens along a side, and frames of latents.
    return PipelineFacts(
        cls.__name__,
        frozenset(parameters),
        multiple,
        defaults,
        output=output,
        inputs=inputs,
        needs=tuple(name for name, each in parameters.items() if each.default is each.empty and name not in _OURS),
        types={name: plain for name, each in parameters.items() if (plain := _plain_types(each.annotation))},
        size=(sides[0], sides[1]) if all(isinstance(side, int) for side in sides) else None,
        ignores_guidance=config.get("guidance_embeds") is False,
        max_side=positions and positions * multiple,
        max_frames=positions and output.max_frames(positions),
    )


def _config(pipeline: Any, part: str) -> Any:
    return getattr(getattr(pipeline, part, None), "config", {})


def _plain_types(annotation: Any) -> tuple[type, ...]:
    """The types that an argument takes, if they are all plain: others are the pipeline's business."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    plain = tuple(option for option in options if option is not types.NoneType)
    return plain if all(option in _PLAIN for option in plain) else ()


def _size_multiple(pipeline: Any) -> int:
    """Pixels of one token: the VAE's scale times the patch size. Pipelines that pack latents do so in 2x2 patches,
    whatever their transformer's config says; modular ones pack them in their blocks."""
    scale = getattr(pipeline, "vae_scale_factor", None) or getattr(pipeline, "vae_scale_factor_spatial", 4)
    transformer, vae = _config(pipeline, "transformer"), _config(pipeline, "vae")
    patch = transformer.get("patch_size", 2)
    channels = vae.get("latent_channels") or vae.get("z_dim")
    is_packed = isinstance(channels, int) and transformer.get("in_channels") == 4 * channels
    if is_packed or hasattr(pipeline, "_pack_latents") or hasattr(pipeline, "_patchify_latents"):
        patch = 2
    parts = getattr(pipeline, "components", {}).values()
    # A processor that is a component, as in modular pipelines, rounds the size of images to its own multiple.
    rounded = [getattr(getattr(part, "config", None), "vae_scale_factor", None) for part in parts]
    token = int(scale * (patch[-1] if isinstance(patch, (list, tuple)) else patch))
    return max(token, *(each for each in rounded if isinstance(each, int)), 1)
