"""Videos and sounds: arrays, and how fast they are played."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import SettingError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class Audio:
    """Sound."""

    samples: np.ndarray[Any, Any]
    """(channels, samples) as float32, from -1 to 1."""
    rate: int
    """Samples per second."""

    def __post_init__(self) -> None:
        if self.samples.ndim != 2 or not self.samples.size:
            shape = tuple(self.samples.shape)
            raise SettingError(f"samples have the shape {shape}; expected (channels, samples).", param="samples")
        if type(self.rate) is not int or self.rate < 1:
            raise SettingError(f"rate must be a number of samples per second, not {self.rate!r}.", param="rate")

    @property
    def seconds(self) -> float:
        return float(self.samples.shape[1] / self.rate)

    def save(self, file: str | Path) -> Path:
        """Write it as .wav, .flac, .mp3, .ogg, .opus, .aac, or .pcm: bare samples of 16 bits."""
        from .writing import save

        return save(self, file)

    def __repr__(self) -> str:
        return f"<Audio: {self.samples.shape[0]} channels, {self.seconds:.2f} s, {self.rate} Hz>"


@dataclass(frozen=True, eq=False)
class Video:
    """Frames, and sound if there is some."""

    frames: np.ndarray[Any, Any]
    """(frames, height, width, 3) as uint8."""
    fps: float
    """Frames per second."""
    audio: Audio | None = None

    def __post_init__(self) -> None:
        if self.frames.ndim != 4 or self.frames.shape[-1] != 3 or str(self.frames.dtype) != "uint8":
            what = f"{self.frames.dtype} of shape {tuple(self.frames.shape)}"
            raise SettingError(f"frames are {what}; expected uint8 (frames, height, width, 3).", param="frames")
        is_number = isinstance(self.fps, (int, float)) and not isinstance(self.fps, bool)
        if not is_number or not 0 < self.fps <= sys.float_info.max:
            raise SettingError(f"fps must be a number above 0, not {self.fps!r}.", param="fps")

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def width(self) -> int:
        return int(self.frames.shape[2])

    @property
    def height(self) -> int:
        return int(self.frames.shape[1])

    @property
    def seconds(self) -> float:
        return len(self) / self.fps

    @property
    def images(self) -> list[Image]:
        """The frames as images."""
        from PIL import Image

        return [Image.fromarray(frame) for frame in self.frames]

    def save(self, file: str | Path) -> Path:
        """Write it as .mp4, .webm or .gif, which has no sound."""
        from .writing import save

        return save(self, file)

    def __repr__(self) -> str:
        sound = f", {self.audio!r}" if self.audio is not None else ""
        return f"<Video: {self.width}x{self.height}, {len(self)} frames, {self.fps:g} fps{sound}>"
