"""Which requests can this pipeline serve? Known once it is loaded, and small enough to send to other processes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, nearest
from ..files import brief
from .request import OmniDiffusionSamplingParams, Request

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..compose.explain import Explanation

_NOT_ARGUMENTS = ("seed", "num_outputs_per_prompt")
"""Each image has its own generator and its own place in the batch."""


@dataclass(frozen=True)
class PipelineFacts:
    """What a pipeline accepts."""

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

    @property
    def can_edit(self) -> bool:
        return "image" in self.takes

    def check(self, request: Request) -> dict[str, Any]:
        """The pipeline's arguments for a request but its images; SettingError if it does not take one of them."""
        params = self.completed(request)
        for name in ("height", "width"):
            size = getattr(params, name)
            if size is not None and size % self.multiple:
                below = self._rounded(size)
                above = self._rounded(size + self.multiple)
                near = f"{below} or {above}" if below < size else f"{below}"
                message = f"{name} must be a multiple of {self.multiple} for this model, not {size}: try {near}."
                raise SettingError(message, param=name)
        if not request.exact and self.scheduled_steps not in (None, params.num_inference_steps):
            raise SettingError(
                f"num_inference_steps={params.num_inference_steps}, but the cache has a schedule for "
                f"{self.scheduled_steps} steps. Leave it out, or compute every step with exact=True.",
                param="num_inference_steps",
            )
        call = {name: value for name, value in params.given().items() if name not in _NOT_ARGUMENTS}
        for name in call:
            if name not in self.takes:
                raise SettingError(f"{self.class_name} does not take {name}. {nearest(name, self.takes)}", param=name)
        if request.tolerance is not None and not self.has_tolerance:
            message = "A tolerance is for the cache 'auto', and this engine has another or none. Choose cache='auto'."
            raise SettingError(message, param="tolerance")
        self._check_adapters([adapter.name for adapter in request.lora])
        self._check_image(request.image)
        return call

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
        side is given."""
        params = request.params.over(self.defaults)
        if request.image is None or not self.can_edit or not {"height", "width"} <= self.takes:
            return params
        image_width, image_height = request.image.size
        width, height = request.params.width, request.params.height
        if width is None:
            width = self._rounded(image_width if height is None else image_width * height // max(1, image_height))
        if height is None:
            given = request.params.width
            height = self._rounded(image_height if given is None else image_height * given // max(1, image_width))
        return replace(params, height=height, width=width)

    def _rounded(self, side: int) -> int:
        return max(self.multiple, side // self.multiple * self.multiple)

    def _check_image(self, image: Image | None) -> None:
        if image is None:
            return
        if not self.can_edit:
            raise SettingError(f"{self.class_name} takes no image: it only makes images from text.", param="image")
        try:
            image.load()  # Does nothing if its pixels are there.
        except (EOFError, OSError, SyntaxError, ValueError) as error:  # Which one depends on the format.
            raise SettingError(f"The image cannot be read: {error}. Is the file complete?", param="image") from error
        if "mask_image" in self.takes and "A" not in image.getbands():
            message = f"{self.class_name} needs an image with an alpha channel: it redraws what is transparent."
            raise SettingError(message, param="image")

    def images(self, image: Image | None) -> dict[str, Any]:
        """The pipeline's arguments for an image to edit: a mask of its transparent part if the pipeline takes one."""
        if image is None:
            return {}
        try:
            images: dict[str, Any] = {"image": image.convert("RGB")}
        except ValueError as error:
            raise SettingError(f"The image cannot be converted to RGB: {error}.", param="image") from error
        if "mask_image" in self.takes:
            images["mask_image"] = image.getchannel("A").point(lambda alpha: 255 - alpha)
        return images


def facts_of(pipeline: Any, defaults: OmniDiffusionSamplingParams) -> PipelineFacts:
    """The facts of a loaded pipeline."""
    takes = frozenset(inspect.signature(pipeline.__call__).parameters)
    return PipelineFacts(type(pipeline).__name__, takes, _size_multiple(pipeline), defaults)


def _size_multiple(pipeline: Any) -> int:
    """Pixels of one token: the VAE's scale times the patch size. Pipelines that pack latents do so in 2x2 patches,
    whatever their transformer's config says."""
    scale = getattr(pipeline, "vae_scale_factor", None) or getattr(pipeline, "vae_scale_factor_spatial", 4)
    patch = getattr(getattr(pipeline, "transformer", None), "config", {}).get("patch_size", 2)
    if hasattr(pipeline, "_pack_latents") or hasattr(pipeline, "_patchify_latents"):
        patch = 2
    return int(scale * (patch[-1] if isinstance(patch, (list, tuple)) else patch))
