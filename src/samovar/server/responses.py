"""What does a client get back? Images in OpenAI's form, at once or as a stream of events."""

from __future__ import annotations

import base64
import io
import json
import time
from dataclasses import asdict
from typing import Any

from PIL.Image import Image
from pydantic import BaseModel

from ..engine import GenerationResult, Preview, Progress, Started
from .bodies import ImageBody

_PIXELS_PER_TOKEN = 16 * 16


class ImageData(BaseModel):
    b64_json: str
    seed: int


class ImagesBody(BaseModel):
    """Images"""

    created: int
    data: list[ImageData]
    background: str = "opaque"
    output_format: str
    size: str
    usage: dict[str, Any]
    samovar: dict[str, Any]


class EventBody(BaseModel):
    """One event of a stream; `data` is JSON."""

    event: str
    data: str


def encode_image(image: Image, body: ImageBody) -> str:
    """An image file in base64. Slow: use a thread."""
    file = io.BytesIO()
    if body.format == "png":
        image.save(file, "PNG", compress_level=1)  # A third of the time for a tenth more bytes.
    else:
        quality = 100 if body.output_compression is None else body.output_compression
        image.convert("RGB").save(file, body.format.upper(), quality=quality)
    return base64.b64encode(file.getvalue()).decode()


def images_response(body: ImageBody, result: GenerationResult, extra: dict[str, Any]) -> str:
    """The response without a stream. Slow: use a thread."""
    pairs = zip(result.images, result.seeds, strict=True)
    return ImagesBody(
        created=int(time.time()),
        data=[ImageData(b64_json=encode_image(image, body), seed=seed) for image, seed in pairs],
        output_format=body.format,
        size=_size(result.images[0]),
        usage=_usage(body, result),
        samovar=_details(result) | extra,
    ).model_dump_json()


def server_event(kind: str, data: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def preview_event(prefix: str, body: ImageBody, preview: Preview, index: int) -> bytes:
    data = _image_event(f"{prefix}.partial_image", body, preview.image)
    return server_event(data["type"], data | {"partial_image_index": index, "image_index": preview.image_index})


def completed_events(prefix: str, body: ImageBody, result: GenerationResult, extra: dict[str, Any]) -> bytes:
    """One event for each image."""
    shared = {"usage": _usage(body, result), "samovar": _details(result) | extra}
    events = []
    for index, (image, seed) in enumerate(zip(result.images, result.seeds, strict=True)):
        data = _image_event(f"{prefix}.completed", body, image) | {"seed": seed, "image_index": index} | shared
        events.append(server_event(data["type"], data))
    return b"".join(events)


def step_event(event: Started | Progress) -> bytes:
    kind = f"samovar.{type(event).__name__.lower()}"
    return server_event(kind, {"type": kind, **asdict(event)})


def _size(image: Image) -> str:
    return f"{image.width}x{image.height}"


def _details(result: GenerationResult) -> dict[str, Any]:
    """What OpenAI's form has no place for."""
    return {
        "seconds": round(result.seconds, 4),
        "num_inference_steps": result.params.num_inference_steps,
        "notes": list(result.notes),
        "cache": [stats.to_dict() if hasattr(stats, "to_dict") else str(stats) for stats in result.cache],
    }


def _usage(body: ImageBody, result: GenerationResult) -> dict[str, Any]:
    """A measure of input and output: words of the prompt, and patches of 16x16 pixels."""
    words = len(body.prompt.split())
    patches = sum(-(-image.width * image.height // _PIXELS_PER_TOKEN) for image in result.images)
    return {
        "input_tokens": words,
        "output_tokens": patches,
        "total_tokens": words + patches,
        "input_tokens_details": {"text_tokens": words, "image_tokens": 0},
        "output_tokens_details": {"text_tokens": 0, "image_tokens": patches},
    }


def _image_event(kind: str, body: ImageBody, image: Image) -> dict[str, Any]:
    return {
        "type": kind,
        "b64_json": encode_image(image, body),
        "created_at": int(time.time()),
        "size": _size(image),
        "quality": "auto",
        "background": "opaque",
        "output_format": body.format,
    }
