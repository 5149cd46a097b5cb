"""Images, videos and sounds: values, and files that they are read from and written to."""

from .reading import read_audio, read_image, read_media, read_video, upright, upright_size
from .stills import spritesheet, thumbnail, webp
from .values import Audio, Video
from .writing import SUFFIXES, check_suffix, encode, numbered, save, usual_suffix

__all__ = [
    "SUFFIXES",
    "Audio",
    "Video",
    "check_suffix",
    "encode",
    "numbered",
    "read_audio",
    "read_image",
    "read_media",
    "read_video",
    "save",
    "spritesheet",
    "thumbnail",
    "upright",
    "upright_size",
    "usual_suffix",
    "webp",
]
