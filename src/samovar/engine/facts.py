"""What can be asked of this pipeline? Known once it is loaded, and small: whoever takes requests can check them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import SettingError, nearest
from .request import OmniDiffusionSamplingParams, Request

_OURS = ("seed", "num_outputs_per_prompt")
"""Settings that are no arguments of a pipeline: each picture has a generator, and a place in the batch."""


@dataclass(frozen=True)
class PipelineFacts:
    """What a pipeline takes."""

    class_name: str
    takes: frozenset[str]
    """The names of its arguments."""
    multiple: int
    """What height and width must be multiples of."""
    defaults: OmniDiffusionSamplingParams = field(default_factory=OmniDiffusionSamplingParams)

    @property
    def can_edit(self) -> bool:
        """Whether it takes a picture to start from."""
        return "image" in self.takes

    def check(self, request: Request) -> dict[str, Any]:
        """The arguments for a request, which is refused if it has any that the pipeline does not take."""
        pictures = self._pictures(request)
        params = self.completed(request)
        for name in ("height", "width"):
            size = getattr(params, name)
            if size is not None and size % self.multiple:
                below = max(self.multiple, size // self.multiple * self.multiple)
                raise SettingError(
                    f"{name} must be a multiple of {self.multiple} for this model, not {size}: try {below} or "
                    f"{size // self.multiple * self.multiple + self.multiple}."
                )
        call = {name: value for name, value in params.given().items() if name not in _OURS}
        for name in call:
            if name not in self.takes:
                raise SettingError(f"{self.class_name} takes no {name}. {nearest(name, self.takes)}")
        return call | pictures

    def completed(self, request: Request) -> OmniDiffusionSamplingParams:
        """The settings of a request and the model's defaults; a picture that is given says how large the new one is,
        or which shape it has where one side is given."""
        params = request.params.over(self.defaults)
        if request.image is None or not {"height", "width"} <= self.takes:
            return params
        width, height = request.image.size
        wide, high = request.params.width, request.params.height
        if wide is None and high is None:
            return replace(params, height=self._fitting(height), width=self._fitting(width))
        if high is None and wide is not None:
            return replace(params, height=self._fitting(height * wide // max(1, width)))
        if wide is None and high is not None:
            return replace(params, width=self._fitting(width * high // max(1, height)))
        return params

    def _fitting(self, side: int) -> int:
        return max(self.multiple, side // self.multiple * self.multiple)

    def _pictures(self, request: Request) -> dict[str, Any]:
        """The picture to start from, and where it may be changed: where it is transparent."""
        if request.image is None:
            return {}
        if not self.can_edit:
            raise SettingError(f"{self.class_name} takes no image: it makes pictures from text alone. Leave it out.")
        if not hasattr(request.image, "convert"):
            raise SettingError(f"image must be a picture of PIL, not {request.image!r}.")
        try:
            pictures: dict[str, Any] = {"image": request.image.convert("RGB")}
        except (EOFError, OSError, SyntaxError, ValueError) as error:  # How PIL says it of its various formats.
            raise SettingError(f"The image cannot be read: {error}. Is its file whole?") from error
        if "mask_image" in self.takes:
            if "A" not in request.image.getbands():
                raise SettingError(
                    f"{self.class_name} must know which part of the image to change. Give one with an alpha channel: "
                    "what is transparent is drawn anew."
                )
            pictures["mask_image"] = request.image.getchannel("A").point(lambda alpha: 255 - alpha)
        return pictures


def facts_of(pipeline: Any, defaults: OmniDiffusionSamplingParams) -> PipelineFacts:
    """What a loaded pipeline takes."""
    takes = inspect.signature(pipeline.__call__).parameters
    scale: int = getattr(pipeline, "vae_scale_factor", 4)
    return PipelineFacts(type(pipeline).__name__, frozenset(takes), 2 * scale, defaults)
