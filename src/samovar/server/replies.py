"""What does a client get back? Pictures as OpenAI's clients read them, at once or as a stream of events."""

from __future__ import annotations

import base64
import io
import json
import time
from typing import Any

from PIL.Image import Image

from ..engine import GeneratedPictures, Preview, Progress, Started
from .protocol import ImageRequest

_PIXELS_OF_A_TOKEN = 16 * 16

_OPEN_USAGE: dict[str, Any] = {
    "type": "object",
    "required": ["input_tokens", "output_tokens", "total_tokens", "input_tokens_details"],
}
IMAGES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["created", "data", "output_format", "size", "usage"],
    "properties": {
        "created": {"type": "integer"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["b64_json", "seed"],
                "properties": {"b64_json": {"type": "string"}, "seed": {"type": "integer"}},
            },
        },
        "output_format": {"enum": ["png", "jpeg", "webp"]},
        "size": {"type": "string"},
        "usage": _OPEN_USAGE,
    },
}
EVENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
"""One event of a stream; `data` is JSON."""


def encode_picture(image: Image, asked: ImageRequest) -> str:
    """A picture as a file in base64. Takes a while: call it in a thread."""
    file = io.BytesIO()
    if asked.output_format == "png":
        image.save(file, "PNG", compress_level=1)  # A third of the time for a tenth more bytes.
    else:
        quality = 100 if asked.compression is None else asked.compression
        image.convert("RGB").save(file, asked.output_format.upper(), quality=quality)
    return base64.b64encode(file.getvalue()).decode()


def images_body(asked: ImageRequest, result: GeneratedPictures, extra: dict[str, Any]) -> bytes:
    """The answer to a request without a stream. Takes a while: call it in a thread."""
    data = [
        {"b64_json": encode_picture(image, asked), "seed": seed}
        for image, seed in zip(result.images, result.seeds, strict=True)
    ]
    body = {
        "created": int(time.time()),
        "data": data,
        "background": "opaque",
        "output_format": asked.output_format,
        "size": size_of(result.images[0]),
        "usage": usage(asked, result),
        "samovar": made_how(result) | extra,
    }
    return json.dumps(body).encode()


def server_event(name: str, data: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def partial_event(prefix: str, asked: ImageRequest, preview: Preview, index: int) -> bytes:
    """A picture on its way."""
    body = _picture_event(f"{prefix}.partial_image", asked, preview.image)
    return server_event(body["type"], body | {"partial_image_index": index, "picture": preview.picture})


def completed_events(prefix: str, asked: ImageRequest, result: GeneratedPictures, extra: dict[str, Any]) -> bytes:
    """The finished pictures, one event each."""
    events = []
    for index, (image, seed) in enumerate(zip(result.images, result.seeds, strict=True)):
        body = _picture_event(f"{prefix}.completed", asked, image)
        body |= {"usage": usage(asked, result), "seed": seed, "picture": index, "samovar": made_how(result) | extra}
        events.append(server_event(body["type"], body))
    return b"".join(events)


def started_event(started: Started) -> bytes:
    return server_event("samovar.started", {"type": "samovar.started", "seconds_queued": started.seconds_queued})


def progress_event(progress: Progress) -> bytes:
    body = {
        "type": "samovar.progress",
        "step": progress.step,
        "num_steps": progress.num_steps,
        "picture": progress.picture,
        "num_pictures": progress.num_pictures,
        "seconds": round(progress.seconds, 4),
        "is_computed": progress.is_computed,
    }
    return server_event("samovar.progress", body)


def size_of(image: Image) -> str:
    return f"{image.width}x{image.height}"


def made_how(result: GeneratedPictures) -> dict[str, Any]:
    """What OpenAI's answer has no word for."""
    return {
        "seconds": round(result.seconds, 4),
        "num_inference_steps": result.params.num_inference_steps,
        "notes": list(result.notes),
        "cache": [stats.to_dict() if hasattr(stats, "to_dict") else str(stats) for stats in result.cache],
    }


def usage(asked: ImageRequest, result: GeneratedPictures) -> dict[str, Any]:
    """A measure of what went in and out: words of the prompt, and patches of 16x16 pixels of the pictures. The model's
    own tokens are counted where it runs, and cost nothing here."""
    words = len(asked.prompt.split())
    patches = sum(-(-image.width * image.height // _PIXELS_OF_A_TOKEN) for image in result.images)
    return {
        "input_tokens": words,
        "output_tokens": patches,
        "total_tokens": words + patches,
        "input_tokens_details": {"text_tokens": words, "image_tokens": 0},
        "output_tokens_details": {"text_tokens": 0, "image_tokens": patches},
    }


def _picture_event(kind: str, asked: ImageRequest, image: Image) -> dict[str, Any]:
    return {
        "type": kind,
        "b64_json": encode_picture(image, asked),
        "created_at": int(time.time()),
        "size": size_of(image),
        "quality": "auto",
        "background": "opaque",
        "output_format": asked.output_format,
    }
