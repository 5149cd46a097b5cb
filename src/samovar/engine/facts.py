"""What a pipeline accepts and makes: known once it is loaded, and small enough to send to other processes."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..arch.calls import call_parameters
from ..compose.explain import Explanation
from ..core.errors import SettingError, nearest
from ..core.files import brief
from ..media import upright_size
from .input_media import Inputs, find_inputs
from .outputs import END, START, OutputKind, find_output
from .request import OmniDiffusionSamplingParams, Request

_NOT_ARGUMENTS = ("seed", "num_outputs_per_prompt", "num_frames", "fps", "seconds")
"""Each output has its own generator and its own place in the batch; the rest has other names in pipelines."""
_OURS = frozenset({"prompt", "generator", "return_dict", "output_type", "callback",
                   "callback_steps", "callback_on_step_end", "callback_on_step_end_tensor_inputs"})  # fmt: skip
"""Arguments that the engine gives itself."""
_CONTROL_SCALE = "controlnet_conditioning_scale"
_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class PipelineFacts:
    """What a pipeline accepts, and what it makes."""

    class_name: str
    takes: frozenset[str]
    """The names of its arguments."""
    multiple: int
    """Height and width must be multiples of this."""
    defaults: OmniDiffusionSamplingParams = field(default_factory=OmniDiffusionSamplingParams)
    scheduled_steps: int | None = None
    """Number of steps of every request, if the cache has a schedule."""
    adapters: Mapping[str, int] = field(default_factory=dict)
    """LoRA adapters that a request may use, with their bytes."""
    has_tolerance: bool = False
    """Whether requests may say how much the cache may lose."""
    lora_bytes: int | None = None
    """The most bytes of adapters that fit into the model at once."""
    explanation: Explanation | None = None
    """What is on the pipeline, and why."""
    output: OutputKind = field(default_factory=OutputKind)
    inputs: Inputs = field(default_factory=Inputs)
    needs: tuple[str, ...] = ()
    """Other arguments without a default."""
    types: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    """The types of arguments that take plain values."""
    size: tuple[int, int] | None = None
    """The height and width that the pipeline takes by default."""
    ignores_guidance: bool = False
    """Whether guidance_scale has no effect."""
    positions: int | None = None
    """Tokens along a side, and frames of latents, that the model has positions for, if it says so."""
    max_side: int | None = None
    """In pixels, if the model has another limit."""

    @property
    def can_edit(self) -> bool:
        """Whether an image can be given, as such or as the only one that guides the model."""
        return self.inputs.takes_image

    @property
    def takes_prompt(self) -> bool:
        return "prompt" in self.takes

    def check(self, request: Request) -> dict[str, Any]:
        """The pipeline's arguments for a request but its inputs; SettingError if it does not take one of them."""
        given = self._given_inputs(request)
        params = self.completed(request)
        self.check_size(params)
        if not request.exact and self.scheduled_steps not in (None, params.num_inference_steps):
            raise SettingError(
                f"num_inference_steps={params.num_inference_steps}, but the cache has a schedule for "
                f"{self.scheduled_steps} steps. Leave it out, or compute every step with exact=True.",
                param="num_inference_steps",
            )
        call = {name: value for name, value in params.given().items() if name not in _NOT_ARGUMENTS}
        for name in call:
            if name not in self.takes:
                raise SettingError(f"{self.class_name} does not take {name}. {self._nearest(name)}", param=name)
        if "max_area" in self.takes and params.height and params.width:  # Else it would be another size, of this area.
            call["max_area"] = params.height * params.width
        if "_auto_resize" in self.takes and _is_small(request.image):  # Else it would be enlarged to a megapixel.
            call["_auto_resize"] = False
        call |= self._length(params)
        for name, value in params.options.items():
            self._check_option(name, value, call)
            call[name] = value
        for count in self.inputs.exactly.values() if _CONTROL_SCALE in self.takes else ():
            if not isinstance(call.setdefault(_CONTROL_SCALE, 1.0), (list, tuple)):  # Of several, some want one each.
                call[_CONTROL_SCALE] = [call[_CONTROL_SCALE]] * count
        if request.prompt and not self.takes_prompt:
            raise SettingError(f"{self.class_name} takes no prompt. Leave it empty.", param="prompt")
        if not any("latents" in name or "embed" in name for name in params.options):  # They may stand for an input.
            self.inputs.check_missing(given, self.class_name)
        for name in self.needs:
            if name not in call:
                raise SettingError(f"{self.class_name} needs {name}. Give it by its name.", param=name)
        if request.tolerance is not None and not self.has_tolerance:
            message = "A tolerance is for the cache 'auto', and this engine has another or none. Choose cache='auto'."
            raise SettingError(message, param="tolerance")
        self._check_adapters([adapter.name for adapter in request.lora])
        return call

    def check_size(self, params: OmniDiffusionSamplingParams) -> None:
        """Refuse sides that the model cannot make."""
        for name in ("height", "width"):
            size = getattr(params, name)
            if size is not None and size % self.multiple:
                below = self._rounded(size)
                above = self._rounded(size + self.multiple)
                near = f"{below} or {above}" if below < size else f"{below}"
                message = f"{name} must be a multiple of {self.multiple} for this model, not {size}: try {near}."
                raise SettingError(message, param=name)
            limits = [self.max_side, self.positions and self.positions * self.multiple]
            most = min((limit for limit in limits if limit is not None), default=None)
            if size is not None and most is not None and size > most:
                raise SettingError(f"{name} must be at most {most} for this model, not {size}.", param=name)
        if self.positions is not None:
            self._check_length(params, self.positions)

    def _check_length(self, params: OmniDiffusionSamplingParams, positions: int) -> None:
        """Refuse what is longer than the model can tell places apart."""
        most = self.output.most_frames(positions)
        is_asked = params.num_frames is not None or params.seconds is not None
        if is_asked and self.num_frames(params) > most:
            param = "num_frames" if params.seconds is None else "seconds"
            message = f"This model makes at most {most} frames, not {self.num_frames(params)}. Ask for fewer."
            raise SettingError(message, param=param)

    def _check_adapters(self, names: list[str]) -> None:
        for name in names:
            if name not in self.adapters:
                hint = nearest(name, self.adapters) if self.adapters else "None is registered: see the setting lora."
                raise SettingError(f"lora: {brief(name)} is not a registered adapter. {hint}", param="lora")
        size = sum(self.adapters[name] for name in names)
        if self.lora_bytes is not None and size > self.lora_bytes:
            message = f"lora: the adapters have {size} bytes together, and lora_memory is {self.lora_bytes}. Use fewer."
            raise SettingError(message, param="lora")

    def completed(self, request: Request) -> OmniDiffusionSamplingParams:
        """The request's settings over the model's defaults. An image to edit sets the size, or the aspect ratio if one
        side is given; of a video it sets the aspect ratio alone."""
        params = request.params.over(self.defaults)
        image = request.images[0] if request.images else None
        if image is None or not self.can_edit or not {"height", "width"} <= self.takes:
            return params
        image_width, image_height = upright_size(image)
        width, height = request.params.width, request.params.height
        if self.output.kind != "image" and width is None and height is None:
            pixels = (params.width or 0) * (params.height or 0) or math.prod(self.size or (0,))
            if not pixels:
                return params
            scale = math.sqrt(pixels / max(1, image_width * image_height))
            image_width, image_height = round(image_width * scale), round(image_height * scale)
        if width is None:
            width = self._rounded(image_width if height is None else image_width * height // max(1, image_height))
        if height is None:
            given = request.params.width
            height = self._rounded(image_height if given is None else image_height * given // max(1, image_width))
        return replace(params, height=height, width=width)

    def fps(self, params: OmniDiffusionSamplingParams) -> float | None:
        """Frames per second of a video with these settings."""
        return params.fps or self.defaults.fps or self.output.fps

    def num_frames(self, params: OmniDiffusionSamplingParams) -> int:
        """Frames of a video with these settings; 1 for other outputs."""
        given = self._length(params).get(self.output.frames_argument or "")
        return given or self.output.frames or 1

    def inputs_of(self, request: Request) -> dict[str, Any]:
        """The pipeline's arguments for the images, videos and sounds of a request."""
        return self.inputs.prepare(self._given_inputs(request), self.output.rate)

    def _given_inputs(self, request: Request) -> dict[str, Any]:
        given = request.given_inputs
        if request.image is not None and self.output.kind == "image" and not self.can_edit:
            remedy = "To start from one, choose another task with the same weights, such as task='img2img'."
            raise SettingError(f"{self.class_name} takes no image. {remedy}", param="image")
        return self.inputs.check(given, self.class_name)

    def _length(self, params: OmniDiffusionSamplingParams) -> dict[str, Any]:
        """The arguments that say how long a video or a sound is."""
        output, call = self.output, dict[str, Any]()
        if output.kind != "video":
            for name in ("num_frames", "fps"):
                if getattr(params, name) is not None:
                    raise SettingError(f"{self.class_name} makes {output}, so it takes no {name}.", param=name)
        if params.fps is not None and output.fps_argument:
            call[output.fps_argument] = params.fps
        if params.num_frames is not None:
            if output.frames_argument is None:
                message = f"{self.class_name} makes as many frames as it is given, so it takes no num_frames."
                raise SettingError(message, param="num_frames")
            call[output.frames_argument] = params.num_frames
        if params.seconds is not None:
            if output.kind == "video" and output.frames_argument:
                call[output.frames_argument] = output.frames_in(params.seconds, self.fps(params) or 1.0)
            elif output.duration_argument:
                call[output.duration_argument] = self._end_of(params.seconds, params.options.get(START))
            else:
                message = f"{self.class_name} makes {output} whose duration cannot be chosen. Leave out seconds."
                raise SettingError(message, param="seconds")
        return call

    def _end_of(self, seconds: float, start: Any) -> float:
        """What is given as the duration: some pipelines want the end of a part, which may start later."""
        most = self.output.most_seconds
        if most is not None and seconds > most:
            message = f"This model makes at most {most:g} seconds of sound, not {seconds:g}. Ask for less."
            raise SettingError(message, param="seconds")
        is_part = self.output.duration_argument == END and isinstance(start, (int, float))
        return float(seconds + start if is_part else seconds)

    def _check_option(self, name: str, value: Any, call: Mapping[str, Any]) -> None:
        if name in _COUNTS:
            message = f"Use num_outputs_per_prompt instead of {name}: each output has its own seed."
            raise SettingError(message, param=name)
        if name in self.inputs.takes:
            message = f"{name}={value!r}; expected an image, a video or a sound."
            raise SettingError(message, param=name)
        if name in _OURS or name not in self.takes:
            raise SettingError(f"{self.class_name} does not take {name}. {self._nearest(name)}", param=name)
        if name in call:
            message = f"{name}={value!r} was given as an option, and is set by a parameter of its own. Give that one."
            raise SettingError(message, param=name)
        allowed = self.types.get(name)
        if allowed is None or value is None:
            return
        is_float = float in allowed and isinstance(value, int) and not isinstance(value, bool)
        if not is_float and type(value) not in allowed:
            expected = " or ".join(_PLAIN[each] for each in allowed)
            raise SettingError(f"{name} must be {expected}, not {value!r}.", param=name)

    def _nearest(self, name: str) -> str:
        ours = {field.name for field in fields(OmniDiffusionSamplingParams)} - {"options"}
        lengths = set() if self.output.kind == "image" else {"num_frames", "fps", "seconds"}
        return nearest(name, sorted((self.takes - _OURS - set(_COUNTS)) | (ours & self.takes) | lengths))

    def _rounded(self, side: int) -> int:
        return max(self.multiple, side // self.multiple * self.multiple)


def facts_of(pipeline: Any, defaults: OmniDiffusionSamplingParams) -> PipelineFacts:
    """The facts of a loaded pipeline."""
    cls = type(pipeline)
    parameters = call_parameters(cls)
    inputs = find_inputs(cls)
    ours = {*inputs.takes, *_OURS}
    needs = [name for name, each in parameters.items() if each.default is each.empty and name not in ours]
    sides: list[Any] = [parameters[name].default if name in parameters else None for name in ("height", "width")]
    return PipelineFacts(
        cls.__name__,
        frozenset(parameters),
        _size_multiple(pipeline),
        defaults,
        output=find_output(pipeline),
        inputs=_for_this_model(_with_controlnets(inputs, pipeline), pipeline),
        needs=tuple(needs),
        types={name: plain for name, each in parameters.items() if (plain := _plain_types(each.annotation))},
        size=(sides[0], sides[1]) if all(isinstance(side, int) for side in sides) else None,
        ignores_guidance=getattr(getattr(pipeline, "transformer", None), "config", {}).get("guidance_embeds") is False,
        positions=getattr(getattr(pipeline, "transformer", None), "config", {}).get("rope_max_seq_len"),
    )


def _with_controlnets(inputs: Inputs, pipeline: Any) -> Inputs:
    """The inputs of a pipeline that has several ControlNets, each of which takes an image."""
    nets = getattr(getattr(pipeline, "controlnet", None), "nets", ())
    if len(nets) < 2:
        return inputs
    return replace(inputs, exactly={inputs.argument("control_image", type(pipeline).__name__): len(nets)})


def _for_this_model(inputs: Inputs, pipeline: Any) -> Inputs:
    """Without what its transformer cannot take: one that sees images by an encoder tells the first and the last frame
    apart by positions, which not all of them have."""
    config = getattr(getattr(pipeline, "transformer", None), "config", {})
    if "last_image" not in inputs.takes or config.get("image_dim") is None or config.get("pos_embed_seq_len"):
        return inputs
    takes = tuple(name for name in inputs.takes if name != "last_image")
    return replace(inputs, takes=takes, lacking={**inputs.lacking, "last_image": "transformer for two images"})


def _is_small(image: Any) -> bool:
    return hasattr(image, "size") and image.size[0] * image.size[1] < 2**20


def _plain_types(annotation: Any) -> tuple[type, ...]:
    """The types that an argument takes, if they are all plain: others are the pipeline's business."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if typing.get_origin(annotation) is typing.Union:
        options = typing.get_args(annotation)
    plain = tuple(option for option in options if option is not types.NoneType)
    return plain if all(option in _PLAIN for option in plain) else ()


def _size_multiple(pipeline: Any) -> int:
    """Pixels of one token: the VAE's scale times the patch size. Pipelines that pack latents do so in 2x2 patches,
    whatever their transformer's config says."""
    scale = getattr(pipeline, "vae_scale_factor", None) or getattr(pipeline, "vae_scale_factor_spatial", 4)
    patch = getattr(getattr(pipeline, "transformer", None), "config", {}).get("patch_size", 2)
    if hasattr(pipeline, "_pack_latents") or hasattr(pipeline, "_patchify_latents") or _packs(pipeline):
        patch = 2
    parts = getattr(pipeline, "components", {}).values()
    # A processor that is a component, as in modular pipelines, rounds the size of images to its own multiple.
    rounded = [getattr(getattr(part, "config", None), "vae_scale_factor", None) for part in parts]
    token = int(scale * (patch[-1] if isinstance(patch, (list, tuple)) else patch))
    return max(token, *(each for each in rounded if isinstance(each, int)), 1)


def _packs(pipeline: Any) -> bool:
    """Whether four latents are one token, by the channels of both: modular pipelines pack them in their blocks."""
    wide, narrow = (getattr(getattr(pipeline, name, None), "config", {}) for name in ("transformer", "vae"))
    channels = narrow.get("latent_channels") or narrow.get("z_dim")
    return isinstance(channels, int) and wide.get("in_channels") == 4 * channels
