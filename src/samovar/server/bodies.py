"""Which requests are valid? OpenAI's fields and ours, read so strictly that two readers cannot disagree."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..engine import OmniDiffusionSamplingParams
from ..errors import nearest
from ..files import parse_settings
from ..tolerances import TOLERANCES
from .api_errors import ApiError
from .settings import Limits

_MAX_SEED = 2**63 - 1
_MAX_SIDE = {"webp": 16_383, "jpeg": 65_500}
"""Pixels that a format can hold per side."""
_SCALAR = re.compile(r"true|false|-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?", flags=re.ASCII)
_CODES = {"missing": "missing_required_parameter", "literal_error": "unsupported_value"}
_PATTERNS = {"prompt": "prompt is empty. Describe the image.",
             "size": "size should be auto or WIDTHxHEIGHT in plain digits, such as 512x512."}  # fmt: skip

Text = Annotated[str, Field(min_length=0)]  # pydantic looks for halves of characters only where it counts them.
Label = Annotated[str, Field(max_length=512)]
Quality = Literal["auto", "high", "medium", "low", "hd", "standard"]
Scale = Annotated[float, Field(ge=0, le=100)]


_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
_LORA_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 100}, "scale": {"type": "number"}},
    "required": ["name"],
    "additionalProperties": False,
}


def _named_tolerance(value: Any) -> Any:
    """The number that a name stands for."""
    if isinstance(value, str) and value not in TOLERANCES:
        raise PydanticCustomError("literal_error", "Input should be a number from 0 to 1, 'exact', 'high' or 'fast'")
    return TOLERANCES[value] if isinstance(value, str) else value


Tolerance = Annotated[
    Annotated[float, Field(ge=0, le=1)] | None,
    BeforeValidator(_named_tolerance),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"enum": list(TOLERANCES)},
                              {"type": "null"}]}),
]  # fmt: skip


class LoraBody(BaseModel):
    """An adapter that a request uses. Only its name: no path of a client is opened."""

    model_config = _STRICT

    name: str = Field(min_length=1, max_length=100)
    scale: float | None = Field(None, ge=-100, le=100)


def _listed(lora: Any) -> Any:
    """The adapters of a request as a list of objects, in whichever form they are given."""
    several = [lora] if isinstance(lora, (str, Mapping)) else lora
    return [{"name": one} if isinstance(one, str) else one for one in several] if isinstance(several, list) else lora


Lora = Annotated[
    Annotated[list[LoraBody], Field(max_length=8)] | None,
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, _LORA_SCHEMA, {"type": "array", "items": _LORA_SCHEMA, "maxItems": 8},
                              {"type": "null"}]}),
]  # fmt: skip


class ImageBody(BaseModel):
    """A request for images. Every field but the prompt may be null, which is the same as leaving it out."""

    model_config = _STRICT

    prompt: str = Field(pattern=r"\S", min_length=1)
    model: Label | None = None
    n: int | None = Field(None, ge=1)
    size: str | None = Field(None, max_length=16, pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(None, ge=0, le=100)
    stream: bool | None = None
    partial_images: int | None = Field(None, ge=0, le=3)
    quality: Quality | None = None
    tolerance: Tolerance = None
    background: Literal["auto", "opaque"] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    seed: int | None = Field(None, ge=0, le=_MAX_SEED)
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    negative_prompt: Text | None = None
    max_sequence_length: int | None = Field(None, ge=1, le=4096)
    deadline: float | None = Field(None, ge=0.001, le=86_400)
    priority: int | None = Field(None, ge=-100, le=100)
    cache: bool | None = None
    lora: Lora = None
    progress: bool | None = None
    """Stream every step too; OpenAI's clients would take these events for images."""

    @property
    def format(self) -> str:
        return self.output_format or "png"

    def params(self) -> OmniDiffusionSamplingParams:
        width: int | None = None
        height: int | None = None
        if self.size is not None and self.size != "auto":
            width, height = map(int, self.size.split("x"))
        names = {field.name for field in fields(OmniDiffusionSamplingParams)} & type(self).model_fields.keys()
        same = {name: getattr(self, name) for name in names}
        return OmniDiffusionSamplingParams(height=height, width=width, num_outputs_per_prompt=self.n, **same)


class GenerationBody(ImageBody):
    """The body of /v1/images/generations"""

    moderation: Literal["auto", "low"] | None = None


class EditBody(ImageBody):
    """The text fields of /v1/images/edits"""

    strength: float | None = Field(None, ge=0, le=1)


Body = TypeVar("Body", bound=ImageBody)
_NOT_TEXT = {
    name
    for name, schema in EditBody.model_json_schema()["properties"].items()
    if schema.get("anyOf", [schema])[0]["type"] != "string"
}


def read_body(kind: type[Body], values: Mapping[str, Any], limits: Limits) -> Body:
    """A body from its values; ApiError names the first field that is wrong."""
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error, kind) from None
    _check_limits(body, limits)
    _check_together(body)
    return body


def read_form(texts: Mapping[str, str], limits: Limits) -> EditBody:
    """A body from the text fields of a form, where numbers and booleans are written as in JSON."""
    values = {
        name: json.loads(text) if name in _NOT_TEXT and _SCALAR.fullmatch(text) else text
        for name, text in texts.items()
    }
    if texts.get("lora", "").startswith(("{", "[")):
        try:
            values["lora"] = parse_settings(texts["lora"])
        except ValueError as error:
            raise _bad("lora", f"lora is not valid JSON: {error}.") from None
    return read_body(EditBody, values, limits)


def request_schema(kind: type[ImageBody], limits: Limits) -> dict[str, Any]:
    """A body as JSON Schema, for /openapi.json."""
    schema = kind.model_json_schema()
    properties = schema["properties"]
    properties["n"]["anyOf"][0]["maximum"] = limits.max_images
    properties["num_inference_steps"]["anyOf"][0]["maximum"] = limits.max_steps
    properties["prompt"]["maxLength"] = limits.max_prompt_characters
    properties["negative_prompt"]["anyOf"][0]["maxLength"] = limits.max_prompt_characters
    if kind is EditBody:
        properties["image"] = {"type": "string", "format": "binary"}
        schema["required"].append("image")
    return schema


def check_sides(output_format: str, width: int, height: int) -> None:
    """Refuse an image that its format cannot hold, before it is made."""
    most = _MAX_SIDE.get(output_format)
    if most is not None and max(width, height) > most:
        message = f"output_format {output_format} holds at most {most} pixels a side, not {width}x{height}. Use png."
        raise _bad("output_format", message, "unsupported_value")


def _check_limits(body: ImageBody, limits: Limits) -> None:
    for name, most in (("n", limits.max_images), ("num_inference_steps", limits.max_steps)):
        value = getattr(body, name)
        if value is not None and value > most:
            raise _bad(name, f"{name} must be at most {most}, not {_shown(value)}.")
    most = limits.max_prompt_characters
    for name in ("prompt", "negative_prompt"):
        length = len(getattr(body, name) or "")
        if length > most:
            message = f"{name} has {length} characters; the limit is {most}. Shorten it."
            raise _bad(name, message, "string_above_max_length")
    params = body.params()
    width, height = params.width or 0, params.height or 0
    if width * height > limits.max_pixels:
        message = f"size {body.size} is {width * height:,} pixels; the limit is {limits.max_pixels:,}."
        raise _bad("size", message, "size_above_limit")
    check_sides(body.format, width, height)


def _check_together(body: ImageBody) -> None:
    """Refuse fields that make no sense beside others."""
    for name in ("partial_images", "progress"):
        if getattr(body, name) and not body.stream:
            raise _bad(name, f"{name} needs stream=true.")
    if body.output_compression is not None and body.format == "png":
        raise _bad("output_compression", "output_compression is for jpeg and webp; png is lossless.")
    if (body.seed or 0) + (body.n or 1) - 1 > _MAX_SEED:
        raise _bad("seed", f"seed + n - 1 must be at most {_MAX_SEED}: image i uses seed + i.")


def _refusal(error: ValidationError, kind: type[ImageBody]) -> ApiError:
    found = error.errors(include_url=False, include_context=False)[0]
    problem = found["type"]
    name = str((found["loc"] or (found["input"],))[0])[:100]  # A name that is not valid text has no location.
    if name == "lora" and len(found["loc"]) > 1:
        where = str(found["loc"][-1])[:100]
        if problem == "extra_forbidden":
            remedy = "Adapters are registered with the server's option --lora; a request gives a name and a scale."
            return _bad(name, f"lora: {where!r} is not taken. {remedy}", "unknown_field")
        return _bad(name, f"lora: {where}: {found['msg']}, not {_shown(found['input'])}.")
    if problem == "extra_forbidden":
        return _bad(name, f"{name!r} is not a known field. {nearest(name, kind.model_fields)}", "unknown_field")
    if problem == "missing":
        return _bad(name, f"{name} is missing.", _CODES[problem])
    if problem == "string_pattern_mismatch":
        return _bad(name, _PATTERNS[name])
    message = re.sub(r"^(Input|String) should", f"{name} should", found["msg"])
    code = _CODES.get(problem, "invalid_type" if problem.endswith("_type") else "invalid_value")
    return _bad(name, f"{message}, not {_shown(found['input'])}.", code)


def _bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def _shown(value: Any) -> str:
    text = repr(value[:60] if isinstance(value, str) else value)  # Of a megabyte it would take long.
    return text if len(text) <= 60 else f"{text[:57]}..."
