"""Valid requests: OpenAI's fields and ours, read so strictly that two readers cannot disagree."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.errors import SettingError, nearest
from ..core.files import brief, parse_settings
from ..core.settings import TOLERANCES
from ..engine import OmniDiffusionSamplingParams
from .errors import ApiError, api_error, refusal
from .settings import Limits

_MAX_SEED = 2**63 - 1
_MAX_SIDE = {"webp": 16_383, "jpeg": 65_500}
"""Pixels that a format can hold per side."""
SCALAR = re.compile(r"true|false|-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?", flags=re.ASCII)
_OPENAI = ("background", "moderation", "style", "input_fidelity", "user")
"""Fields of OpenAI's own models."""
_CODES = {"missing": "missing_required_parameter", "literal_error": "unsupported_value"}
_PATTERNS = {"prompt": "prompt is empty. Say what to make.", "input": "input is empty. Say what to make.",
             "size": "size should be auto or WIDTHxHEIGHT in plain digits, such as 512x512."}  # fmt: skip

Text = Annotated[str, Field(min_length=0)]  # pydantic looks for halves of characters only where it counts them.
Label = Annotated[str, Field(max_length=512)]
Quality = Literal["auto", "high", "medium", "low", "hd", "standard"]
Scale = Annotated[float, Field(ge=0, le=100)]
Side = Annotated[int, Field(ge=1, le=99_999)]
Size = Annotated[str | None, Field(max_length=16, pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")]


def _number(value: Any) -> Any:
    """OpenAI writes seconds as text."""
    return json.loads(value) if isinstance(value, str) and SCALAR.fullmatch(value) else value


Seconds = Annotated[Annotated[float, Field(ge=0.001, le=86_400)] | None, BeforeValidator(_number)]

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


class RequestBody(BaseModel):
    """A request. Every field but the prompt may be null, which is the same as leaving it out."""

    model_config = _STRICT
    wire_names: ClassVar[Mapping[str, str]] = {}
    """What parameters of the engine are called in this body, if not the same."""

    prompt: str = Field(pattern=r"\S", min_length=1)
    model: Label | None = None
    quality: Quality | None = None
    tolerance: Tolerance = None
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
    _options: dict[str, Any] = PrivateAttr(default_factory=dict)
    """Other arguments of the pipeline."""

    @property
    def options(self) -> dict[str, Any]:
        return self._options

    @property
    def num_previews(self) -> int:
        return getattr(self, "partial_images", None) or 0

    def params(self) -> OmniDiffusionSamplingParams:
        names = {field.name for field in fields(OmniDiffusionSamplingParams)} & type(self).model_fields.keys()
        same = {name: getattr(self, name) for name in names}
        return OmniDiffusionSamplingParams(**{"options": self._options} | same | self._other_params())

    def _other_params(self) -> dict[str, Any]:
        """Those that have another name."""
        return {}

    def values(self) -> dict[str, Any]:
        """What was given, as `read_body` takes it."""
        return self.model_dump(exclude_none=True) | self._options


class ImageBody(RequestBody):
    """A request for images."""

    n: int | None = Field(None, ge=1)
    size: Size = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(None, ge=0, le=100)
    stream: bool | None = None
    partial_images: int | None = Field(None, ge=0, le=3)
    background: Literal["auto", "opaque", "transparent"] | None = None
    moderation: Literal["auto", "low"] | None = None
    style: Literal["vivid", "natural"] | None = None
    input_fidelity: Literal["high", "low"] | None = None
    progress: bool | None = None
    """Stream every step too; OpenAI's clients would take these events for images."""

    @property
    def format(self) -> str:
        return self.output_format or "png"

    @property
    def notes(self) -> list[str]:
        """What was asked for as OpenAI's models take it, and means nothing here."""
        return [f"{name}={value!r} was not used: it means nothing here." for name, value in self
                if name in _OPENAI and value not in (None, "auto", "opaque")]  # fmt: skip

    def _other_params(self) -> dict[str, Any]:
        return {**_sides(self.size), "num_outputs_per_prompt": self.n}


class GenerationBody(ImageBody):
    """The body of /v1/images/generations"""


class EditBody(ImageBody):
    """The text fields of /v1/images/edits"""

    strength: float | None = Field(None, ge=0, le=1)


class VideoBody(RequestBody):
    """The body of /v1/videos, without its file"""

    wire_names = {"image": "input_reference"}

    prompt: Text = ""
    size: Size = None
    seconds: Seconds = None
    width: Side | None = None
    height: Side | None = None
    num_frames: int | None = Field(None, ge=1)
    fps: float | None = Field(None, ge=0.01, le=1000)
    strength: float | None = Field(None, ge=0, le=1)
    partial_images: int | None = Field(None, ge=0, le=3)
    """Previews, which can be read as the thumbnail while the video is made."""

    def _other_params(self) -> dict[str, Any]:
        return {"num_outputs_per_prompt": 1} | ({} if self.size in (None, "auto") else _sides(self.size))


class RemixBody(BaseModel):
    """The body of /v1/videos/ID/remix"""

    model_config = _STRICT

    prompt: str = Field(pattern=r"\S", min_length=1)


class AudioBody(RequestBody):
    """The body of /v1/audio/generate"""

    wire_names = {"prompt": "input", "seconds": "audio_length", "audio_start_in_s": "audio_start"}

    prompt: str = Field(alias="input", pattern=r"\S", min_length=1)
    audio_length: Seconds = None
    audio_start: float | None = Field(None, ge=0, le=86_400)
    response_format: Literal["wav", "mp3", "flac", "pcm", "aac", "opus"] | None = None

    @property
    def format(self) -> str:
        return self.response_format or "wav"

    def _other_params(self) -> dict[str, Any]:
        start = {} if self.audio_start is None else {"audio_start_in_s": self.audio_start}
        return {"seconds": self.audio_length, "num_outputs_per_prompt": 1, "options": self._options | start}


class SpeechBody(AudioBody):
    """The body of /v1/audio/speech; what a model of diffusers cannot obey has only the values that ask for nothing"""

    voice: Literal["auto", "default"] | None = None
    speed: float | None = Field(None, ge=1, le=1)
    stream_format: Literal["audio"] | None = None

    @property
    def format(self) -> str:
        return self.response_format or "mp3"


Body = TypeVar("Body", bound=RequestBody)
Checked = TypeVar("Checked", bound=BaseModel)


def read_body(
    kind: type[Body],
    values: Mapping[str, Any],
    limits: Limits,
    options: Collection[str] = (),
    closed: Collection[str] = (),
) -> Body:
    """A body from its values; ApiError names the first field that is wrong. Other arguments of the pipeline may be
    among them, if they are `options` and not `closed`."""
    given = {name: value for name, value in values.items() if name in options}
    body = checked(kind, {name: value for name, value in values.items() if name not in given}, options, closed)
    body._options = {name: value for name, value in given.items() if value is not None}
    _check_limits(body, limits)
    if isinstance(body, ImageBody):
        _check_together(body)
    if isinstance(body, VideoBody) and body.size not in (None, "auto") and (body.width or body.height):
        raise refusal("size", "size says the same as width and height. Give one of them.")
    return body


def checked(
    kind: type[Checked], values: Mapping[str, Any], options: Collection[str] = (), closed: Collection[str] = ()
) -> Checked:
    """The fields of a body, each by itself."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refused(error, kind, options, closed) from None


def read_texts(kind: type[RequestBody], texts: Mapping[str, str], options: Mapping[str, bool]) -> dict[str, Any]:
    """The values of a form's text fields, where numbers, booleans and lists are written as in JSON. Of each option it
    says whether it is text."""
    values: dict[str, Any] = dict(texts)
    for name, text in texts.items():
        if options.get(name, name in _text_fields(kind)) or name not in {*options, *field_names(kind)}:
            continue
        if SCALAR.fullmatch(text):
            values[name] = json.loads(text)
        elif text.startswith(("{", "[")):
            try:
                values[name] = parse_settings(text)
            except ValueError as error:
                raise refusal(name, f"{name} is not valid JSON: {error}.") from None
    return values


@functools.cache
def field_names(kind: type[BaseModel]) -> frozenset[str]:
    """The fields of a body as clients call them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@functools.cache
def _text_fields(kind: type[RequestBody]) -> frozenset[str]:
    schemas = kind.model_json_schema()["properties"]
    first = {name: schema.get("anyOf", [schema])[0] for name, schema in schemas.items() if name != "lora"}
    return frozenset(name for name, schema in first.items() if schema.get("type") == "string")


def request_schema(kind: type[RequestBody], limits: Limits, files: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """A body as JSON Schema, for /openapi.json; of its files, by name, whether they are needed."""
    schema = kind.model_json_schema()
    properties = schema["properties"]
    for name, most in _most(limits).items():
        if name in properties:
            properties[name]["anyOf"][0]["maximum"] = most
    properties[kind.model_fields["prompt"].alias or "prompt"]["maxLength"] = limits.max_prompt_characters
    properties["negative_prompt"]["anyOf"][0]["maxLength"] = limits.max_prompt_characters
    for name, is_needed in (files or {}).items():
        properties[name] = {"type": "string", "format": "binary"}
        if is_needed:
            schema["required"].append(name)
    return schema


def check_sides(output_format: str, width: int, height: int) -> None:
    """Refuse an image that its format cannot hold, before it is made."""
    most = _MAX_SIDE.get(output_format)
    if most is not None and max(width, height) > most:
        message = f"output_format {output_format} holds at most {most} pixels a side, not {width}x{height}. Use png."
        raise refusal("output_format", message, "unsupported_value")


def _sides(size: str | None) -> dict[str, int | None]:
    width, height = (None, None) if size in (None, "auto") else map(int, size.split("x"))
    return {"width": width, "height": height}


def _most(limits: Limits) -> dict[str, int]:
    return {"n": limits.max_images, "num_inference_steps": limits.max_steps, "num_frames": limits.max_frames}


def _check_limits(body: RequestBody, limits: Limits) -> None:
    for name, most in _most(limits).items():
        value = getattr(body, name, None)
        if value is not None and value > most:
            raise refusal(name, f"{name} must be at most {most}, not {brief(value)}.")
    most = limits.max_prompt_characters
    for name in ("prompt", "negative_prompt"):
        length = len(getattr(body, name) or "")
        if length > most:
            wire_name = type(body).model_fields[name].alias or name
            message = f"{wire_name} has {length} characters; the limit is {most}. Shorten it."
            raise refusal(wire_name, message, "string_above_max_length")
    try:
        params = body.params()
    except SettingError as error:
        raise api_error(error) from error
    width, height = params.width or 0, params.height or 0
    if width * height > limits.max_pixels:
        message = f"size {width}x{height} is {width * height:,} pixels; the limit is {limits.max_pixels:,}."
        raise refusal("size", message, "size_above_limit")
    if isinstance(body, ImageBody):
        check_sides(body.format, width, height)


def _check_together(body: ImageBody) -> None:
    """Refuse fields that make no sense beside others."""
    for name in ("partial_images", "progress"):
        if getattr(body, name) and not body.stream:
            raise refusal(name, f"{name} needs stream=true.")
    if body.output_compression is not None and body.format == "png":
        raise refusal("output_compression", "output_compression is for jpeg and webp; png is lossless.")
    if (body.seed or 0) + (body.n or 1) - 1 > _MAX_SEED:
        raise refusal("seed", f"seed + n - 1 must be at most {_MAX_SEED}: image i uses seed + i.")


def _refused(
    error: ValidationError, kind: type[BaseModel], options: Collection[str], closed: Collection[str]
) -> ApiError:
    found = error.errors(include_url=False, include_context=False)[0]
    problem = found["type"]
    name = str((found["loc"] or (found["input"],))[0])[:100]  # A name that is not valid text has no location.
    if name == "lora" and len(found["loc"]) > 1:
        where = str(found["loc"][-1])[:100]
        if problem == "extra_forbidden":
            remedy = "Adapters are registered with the server's option --lora; a request gives a name and a scale."
            return refusal(name, f"lora: {where!r} is not taken. {remedy}", "unknown_field")
        return refusal(name, f"lora: {where}: {found['msg']}, not {brief(found['input'])}.")
    if problem == "extra_forbidden":
        if name in closed:
            why = "It is no plain value, or says how much is computed: for that there are size, n, num_frames, seconds."
            message = f"{name!r} is an argument of the pipeline that requests cannot set. {why}"
            return refusal(name, message, "unsupported_value")
        hint = nearest(name, {*field_names(kind), *options}.difference(_OPENAI))
        return refusal(name, f"{name!r} is not a known field. {hint}", "unknown_field")
    if problem == "missing":
        return refusal(name, f"{name} is missing.", _CODES[problem])
    if problem == "string_pattern_mismatch":
        return refusal(name, _PATTERNS[name])
    message = re.sub(r"^(Input|String) should", f"{name} should", found["msg"])
    code = _CODES.get(problem, "invalid_type" if problem.endswith("_type") else "invalid_value")
    return refusal(name, f"{message}, not {brief(found['input'])}.", code)
