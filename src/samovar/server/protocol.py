"""What may a request for pictures say? OpenAI's fields and ours, in one table that checks them and describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..engine import OmniDiffusionSamplingParams
from ..errors import nearest
from .failures import Refusal
from .settings import Limits
from .strict import read_flag, read_number, read_whole

Kind = Literal["text", "whole", "number", "flag"]
_TYPES: dict[Kind, tuple[type, ...]] = {"text": (str,), "whole": (int,), "number": (int, float), "flag": (bool,)}
_WORDS: dict[Kind, str] = {"text": "text", "whole": "a whole number", "number": "a number", "flag": "true or false"}
_SCHEMA_TYPES: dict[Kind, str] = {"text": "string", "whole": "integer", "number": "number", "flag": "boolean"}

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", flags=re.ASCII)
_MOST_SEED = 2**63 - 1
_MOST_SIDE = {"webp": 16_383, "jpeg": 65_500}
"""Pixels of a side, where the format has an end."""
_SAME_NAME = {field.name for field in fields(OmniDiffusionSamplingParams)}
"""Fields that are settings of a picture, as they are."""


@dataclass(frozen=True)
class Field:
    """One field of a request."""

    kind: Kind
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    most_characters: int | None = None
    refused: Mapping[str, str] | None = None
    """Values that OpenAI knows and we cannot serve, with the reason."""
    pattern: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that does not fit."""
        if type(value) not in _TYPES[self.kind]:  # A bool is an int to Python, and to nobody else.
            raise _bad(name, f"{name} must be {_WORDS[self.kind]}, not {_shown(value)}.", "invalid_type")
        if self.refused and value in self.refused:
            raise _bad(name, f"{name}={value!r} cannot be served: {self.refused[value]}", "unsupported_value")
        if self.choices and value not in self.choices:
            hint = nearest(value, self.choices)
            raise _bad(name, f"{name} must be one of {', '.join(self.choices)}, not {_shown(value)}. {hint}")
        if (self.least is not None and value < self.least) or (self.most is not None and value > self.most):
            raise _bad(name, f"{name} must be from {self.least:g} to {self.most:g}, not {_shown(value)}.")
        if self.most_characters is not None and len(value) > self.most_characters:
            message = f"{name} has {len(value)} characters; at most {self.most_characters} are read. Shorten it."
            raise _bad(name, message, "string_above_max_length")

    def from_text(self, text: str) -> Any:
        """A form's text as a value; text that cannot be one stays text, for `check` to refuse."""
        readers = {"whole": read_whole, "number": read_number, "flag": read_flag}
        return readers[self.kind](text) if self.kind != "text" else text

    def schema(self) -> dict[str, Any]:
        """The field as JSON Schema; null is the same as leaving it out."""
        rules = {
            "enum": [*self.choices, None] if self.choices else None,
            "minimum": self.least,
            "maximum": self.most,
            "maxLength": self.most_characters,
            "pattern": self.pattern,
        }
        return {"type": [_SCHEMA_TYPES[self.kind], "null"]} | {k: v for k, v in rules.items() if v is not None}


def fields_of(limits: Limits, *, is_edit: bool) -> dict[str, Field]:
    """The fields of a request, within some limits."""
    text = Field("text", most_characters=limits.max_prompt_characters)
    label = Field("text", most_characters=512)
    guidance = Field("number", least=0, most=100)
    fixed = "the model has one quality and one background. Leave it out, or give auto."
    openai = {
        "prompt": text,
        "model": label,
        "n": Field("whole", least=1, most=limits.max_pictures),
        "size": Field("text", most_characters=16, pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"),
        "response_format": Field(
            "text", choices=("b64_json",), refused={"url": "no pictures are kept to be fetched later. Give b64_json."}
        ),
        "output_format": Field("text", choices=("png", "jpeg", "webp")),
        "output_compression": Field("whole", least=0, most=100),
        "stream": Field("flag"),
        "partial_images": Field("whole", least=0, most=3),
        "quality": Field("text", choices=("auto",), refused=dict.fromkeys(("low", "medium", "high", "hd"), fixed)),
        "background": Field("text", choices=("auto", "opaque"), refused={"transparent": fixed}),
        "user": label,
        "safety_identifier": label,
    }
    ours = {
        "seed": Field("whole", least=0, most=_MOST_SEED),
        "num_inference_steps": Field("whole", least=1, most=limits.max_steps),
        "guidance_scale": guidance,
        "true_cfg_scale": guidance,
        "negative_prompt": text,
        "max_sequence_length": Field("whole", least=1, most=4096),
        "deadline": Field("number", least=0.001, most=86_400),
        "priority": Field("whole", least=-100, most=100),
        "cache": Field("flag"),
        "progress": Field("flag"),
    }
    moderation, strength = Field("text", choices=("auto", "low")), Field("number", least=0, most=1)
    only_here = {"strength": strength} if is_edit else {"moderation": moderation}
    return openai | only_here | ours


@dataclass(frozen=True)
class ImageRequest:
    """What is asked for, all of it checked but for what only the model knows."""

    prompt: str
    params: OmniDiffusionSamplingParams
    model: str | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    compression: int | None = None
    is_streamed: bool = False
    num_previews: int = 0
    has_progress: bool = False
    """Whether the stream also tells every step; OpenAI's clients would take that for pictures."""
    deadline_s: float | None = None
    priority: int = 0
    is_cached: bool = True

    @classmethod
    def from_values(cls, values: Mapping[str, Any], limits: Limits, *, is_edit: bool = False) -> ImageRequest:
        """A request from its fields, of which every one is checked."""
        known = fields_of(limits, is_edit=is_edit)
        given = {name: value for name, value in values.items() if value is not None}
        for name in (name[:100] for name in values):
            if name not in known:
                raise _bad(name, f"{name!r} is no known field. {nearest(name, known)}", "unknown_field")
        for name, value in given.items():
            known[name].check(name, value)
        if not given.get("prompt", "").strip():
            raise _bad("prompt", "prompt is missing or empty. Say what to draw.", "missing_required_parameter")
        _check_together(given)
        width, height = _read_size(given.get("size", "auto"), limits)
        check_sides(given.get("output_format", "png"), width or 0, height or 0)
        same = {name: value for name, value in given.items() if name in _SAME_NAME}
        params = OmniDiffusionSamplingParams(height=height, width=width, num_outputs_per_prompt=given.get("n"), **same)
        return cls(
            given["prompt"],
            params,
            model=given.get("model"),
            output_format=given.get("output_format", "png"),
            compression=given.get("output_compression"),
            is_streamed=given.get("stream", False),
            num_previews=given.get("partial_images", 0),
            has_progress=given.get("progress", False),
            deadline_s=given.get("deadline"),
            priority=given.get("priority", 0),
            is_cached=given.get("cache", True),
        )

    @classmethod
    def from_form(cls, texts: Mapping[str, str], limits: Limits) -> ImageRequest:
        """A request from the text fields of a form."""
        known = fields_of(limits, is_edit=True)
        values = {name: known[name].from_text(text) if name in known else text for name, text in texts.items()}
        return cls.from_values(values, limits, is_edit=True)


def check_sides(output_format: str, width: int, height: int) -> None:
    """Refuse a picture that its format cannot hold, before it is made."""
    most = _MOST_SIDE.get(output_format)
    if most is not None and max(width, height) > most:
        message = f"output_format {output_format} holds at most {most} pixels a side, not {width}x{height}. Give png."
        raise _bad("output_format", message, "unsupported_value")


def request_schema(limits: Limits, *, is_edit: bool) -> dict[str, Any]:
    """The request as JSON Schema, for /openapi.json."""
    properties = {name: known.schema() for name, known in fields_of(limits, is_edit=is_edit).items()}
    properties["prompt"] |= {"type": "string", "minLength": 1, "pattern": r"\S"}
    required = ["prompt"]
    if is_edit:
        properties["image"] = {"type": "string", "format": "binary"}
        required.append("image")
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _check_together(given: Mapping[str, Any]) -> None:
    """Refuse what has no meaning beside something else."""
    if not given.get("stream", False):
        for name in ("partial_images", "progress"):
            if given.get(name):
                raise _bad(name, f"{name} needs stream=true: without a stream there is nowhere to send it.")
    if "output_compression" in given and given.get("output_format", "png") == "png":
        raise _bad("output_compression", "output_compression is for jpeg and webp: a png loses nothing.")
    if given.get("seed", 0) + given.get("n", 1) - 1 > _MOST_SEED:
        raise _bad("seed", f"seed + n must stay within {_MOST_SEED}: picture i is that of seed + i.")


def _read_size(size: str, limits: Limits) -> tuple[int | None, int | None]:
    if size == "auto":
        return None, None
    match = _SIZE.fullmatch(size)
    if match is None:
        raise _bad("size", f"size must be auto or WIDTHxHEIGHT in plain digits, such as 512x512, not {_shown(size)}.")
    width, height = int(match.group(1)), int(match.group(2))
    if width * height > limits.max_pixels:
        message = f"size {size} is {width * height:,} pixels; at most {limits.max_pixels:,} are made here."
        raise _bad("size", message, "size_above_limit")
    return width, height


def _bad(param: str, message: str, code: str = "invalid_value") -> Refusal:
    return Refusal(400, message, param=param, code=code)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
