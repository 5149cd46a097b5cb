"""Valid requests: OpenAI's fields and ours, read so strictly that two readers cannot disagree.

Each kind of request is a class. `schema_of` completes it with the limits of the server and with the arguments of the
loaded pipeline; the checks, the parameters of the engine and the documentation come from that.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from starlette.requests import HTTPConnection

from ..core.errors import nearest
from ..core.files import brief, parse_settings
from ..engine import OmniDiffusionSamplingParams, PipelineFacts
from .errors import ApiError
from .settings import Limits

_MAX_SEED = 2**63 - 1
_SCALAR = re.compile(r"true|false|-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?", flags=re.ASCII)
_OPENAI = ("background", "moderation", "style", "input_fidelity", "user")
"""Fields of OpenAI's own models."""
_LIMITED = {"num_outputs_per_prompt": ("le", "max_images"), "num_inference_steps": ("le", "max_steps"),
            "num_frames": ("le", "max_frames"), "prompt": ("max_length", "max_prompt_characters"),
            "negative_prompt": ("max_length", "max_prompt_characters")}  # fmt: skip
"""Fields with a limit of the server: its kind, and its name."""
_MESSAGES = {"prompt": "prompt is empty. Say what to make.", "input": "input is empty. Say what to make.",
             "size": "size should be auto or WIDTHxHEIGHT in plain digits, such as 512x512."}  # fmt: skip
"""For texts that do not match their patterns."""
_CODES = {"missing": "missing_required_parameter", "literal_error": "unsupported_value",
          "string_too_long": "string_above_max_length"}  # fmt: skip
_HOW_MUCH = re.compile(
    r"(^|_)(num|max|count|height|width|area|size|resolution|frames?|length|duration|batch|steps?|layers?|tiles?)(_|$)"
)
"""Words in the names of arguments that set sizes, counts and durations."""
_OTHER_PROMPTS = re.compile(r"(negative_)?prompt_\d")
_CLOSED = frozenset({"prompt", "output_type", "return_dict", "num_images_per_prompt", "num_videos_per_prompt",
                     "num_waveforms_per_prompt"})  # fmt: skip


def _number(value: Any) -> Any:
    """OpenAI writes seconds as text."""
    return json.loads(value) if isinstance(value, str) and _SCALAR.fullmatch(value) else value


def _listed(lora: Any) -> Any:
    """The adapters of a request as a list of objects, in whichever form they are given."""
    several = [lora] if isinstance(lora, (str, Mapping)) else lora
    return [{"name": one} if isinstance(one, str) else one for one in several] if isinstance(several, list) else lora


STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class LoraBody(BaseModel):
    """An adapter that a request uses. Only its name: no path of a client is opened."""

    model_config = STRICT

    name: str = Field(min_length=1, max_length=100)
    scale: float | None = Field(None, ge=-100, le=100)


Prompt = Annotated[str, Field(pattern=r"\S", min_length=1)]
Text = Annotated[str, Field(min_length=0)]  # pydantic looks for halves of characters only where it counts them.
Label = Annotated[str, Field(max_length=512)]
Quality = Literal["auto", "high", "medium", "low", "hd", "standard"]
Scale = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Side = Annotated[int, Field(ge=1, le=99_999)]
Count = Annotated[int, Field(ge=1)]
Duration = Annotated[float, Field(ge=0.001, le=86_400)]
Seconds = Annotated[Duration | None, BeforeValidator(_number, json_schema_input_type=Duration | str | None)]
Size = Annotated[str, Field(max_length=16, pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")]
Previews = Annotated[int, Field(ge=0, le=3)]
_Adapters = Annotated[list[LoraBody], Field(max_length=8)]
Lora = Annotated[
    _Adapters | None, BeforeValidator(_listed, json_schema_input_type=str | LoraBody | list[str | LoraBody] | None)
]


class RequestBody(BaseModel):
    """A request. Every field but the prompt may be null, which is the same as leaving it out."""

    model_config = STRICT
    option_names: ClassVar[tuple[str, ...]] = ()
    """Fields that are arguments of the loaded pipeline."""

    prompt: Prompt
    model: Label | None = None
    quality: Quality | None = None
    tolerance: Share | Literal["exact", "high", "fast"] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    seed: int | None = Field(None, ge=0, le=_MAX_SEED)
    num_inference_steps: Count | None = None
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    negative_prompt: Text | None = None
    max_sequence_length: int | None = Field(None, ge=1, le=4096)
    deadline: Duration | None = None
    priority: int | None = Field(None, ge=-100, le=100)
    cache: bool | None = None
    lora: Lora = None

    @property
    def format(self) -> str:
        """Of the file that is made."""
        return "mp4"

    @property
    def num_previews(self) -> int:
        return getattr(self, "partial_images", None) or 0

    def check(self) -> None:
        """Refuse fields that make no sense beside others."""

    def params(self) -> OmniDiffusionSamplingParams:
        names = {field.name for field in fields(OmniDiffusionSamplingParams)}
        given = {name: value for name, value in self if name in names} | _sides(getattr(self, "size", None))
        given.setdefault("num_outputs_per_prompt", 1)
        options = {name: getattr(self, name) for name in self.option_names if getattr(self, name) is not None}
        return OmniDiffusionSamplingParams(**given, options=options)

    @classmethod
    def wire_name(cls, name: str | None) -> str | None:
        """What a parameter of the engine is called in this body."""
        field = cls.model_fields.get(name or "")
        return name if field is None else field.alias or name


class ImageBody(RequestBody):
    """A request for images."""

    num_outputs_per_prompt: Count | None = Field(None, alias="n")
    size: Size | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(None, ge=0, le=100)
    stream: bool | None = None
    partial_images: Previews | None = None
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

    def check(self) -> None:
        for name in ("partial_images", "progress"):
            if getattr(self, name) and not self.stream:
                raise ApiError(f"{name} needs stream=true.", name)
        if self.output_compression is not None and self.format == "png":
            raise ApiError("output_compression is for jpeg and webp; png is lossless.", "output_compression")
        if (self.seed or 0) + (self.num_outputs_per_prompt or 1) - 1 > _MAX_SEED:
            raise ApiError(f"seed + n - 1 must be at most {_MAX_SEED}: image i uses seed + i.", "seed")


class GenerationBody(ImageBody):
    """The body of /v1/images/generations"""


class EditBody(ImageBody):
    """The text fields of /v1/images/edits"""

    strength: Share | None = None


class VideoBody(RequestBody):
    """The body of /v1/videos, without its file"""

    size: Size | None = None
    seconds: Seconds = None
    width: Side | None = None
    height: Side | None = None
    num_frames: Count | None = None
    fps: float | None = Field(None, ge=0.01, le=1000)
    strength: Share | None = None
    partial_images: Previews | None = None
    """Previews, which can be read as the thumbnail while the video is made."""

    def check(self) -> None:
        if _sides(self.size) and (self.width or self.height):
            raise ApiError("size says the same as width and height. Give one of them.", "size")

    @classmethod
    def wire_name(cls, name: str | None) -> str | None:
        return "input_reference" if name == "image" else name


class RemixBody(BaseModel):
    """The body of /v1/videos/ID/remix"""

    model_config = STRICT

    prompt: Prompt


class AudioBody(RequestBody):
    """The body of /v1/audio/generate"""

    option_names = ("audio_start_in_s",)

    prompt: Prompt = Field(alias="input")
    seconds: Seconds = Field(None, alias="audio_length")
    audio_start_in_s: float | None = Field(None, alias="audio_start", ge=0, le=86_400)
    response_format: Literal["wav", "mp3", "flac", "pcm", "aac", "opus"] | None = None

    @property
    def format(self) -> str:
        return self.response_format or "wav"


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


def schema_of(kind: type[Body], limits: Limits, facts: PipelineFacts | None = None) -> type[Body]:
    """A kind of request with the limits of a server, and with the arguments of its pipeline that a request may set."""
    known = kind.model_fields
    limited = {name: Field(**{how: getattr(limits, limit)}) for name, (how, limit) in _LIMITED.items()}
    added: dict[str, Any] = {
        name: (Annotated[known[name].annotation, limited[name]], known[name]) for name in known.keys() & limited
    }
    options = {} if facts is None else _options(facts, limits)
    options = {
        name: (type | None, None) for name, type in options.items() if name not in known.keys() | field_names(kind)
    }
    if facts is not None and not facts.takes_prompt:
        added["prompt"] = (Text, "")
    made = create_model(kind.__name__, __base__=kind, __doc__=kind.__doc__, **added, **options)
    made.option_names = (*kind.option_names, *options)
    return made


def _options(facts: PipelineFacts, limits: Limits) -> dict[str, Any]:
    """The types of arguments that a request may set by their names: plain ones that do not say how much is computed. A
    count could be a way around the limits, so those have names of their own, or are set by whoever runs the server."""
    text = Annotated[str, Field(max_length=limits.max_prompt_characters)]
    plain = {bool: bool, float: float, str: text, int: Annotated[int, Field(ge=-(2**63), lt=2**63)]}
    output = facts.output
    own = {output.frames_argument, output.fps_argument, output.duration_argument, *facts.inputs.takes}
    free = facts.takes - own - _CLOSED
    schedule = Annotated[list[float], Field(min_length=1, max_length=limits.max_steps)]
    found: dict[str, Any] = dict.fromkeys(free & {"sigmas", "timesteps"}, schedule)
    found |= {name: text for name in free if _OTHER_PROMPTS.fullmatch(name)}
    for name in free & facts.types.keys():
        types = facts.types[name]
        if types == (bool,) or not _HOW_MUCH.search(name):
            found[name] = Union[tuple(plain[each] for each in types)]  # noqa: UP007 - As many as there are.
    return found


def read_body(kind: type[Checked], values: Mapping[str, Any], facts: PipelineFacts | None = None) -> Checked:
    """A body from its values; ApiError names the first field that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refused(error, kind, facts) from None


def read_query(kind: type[Checked], http: HTTPConnection) -> Checked:
    """What is behind the question mark of an address."""
    for name in http.query_params:
        if len(http.query_params.getlist(name)) > 1:
            raise ApiError(f"{name[:50]!r} is given more than once. Give it once.", name)
    return read_body(kind, read_texts(kind, http.query_params))


def read_texts(kind: type[BaseModel], texts: Mapping[str, str]) -> dict[str, Any]:
    """The values of a form's text fields, where numbers, booleans and lists are written as in JSON."""
    values: dict[str, Any] = dict(texts)
    for name in (field_names(kind) - _text_fields(kind)) & texts.keys():
        text = texts[name]
        try:
            if text.startswith(("{", "[")) or _SCALAR.fullmatch(text):
                values[name] = parse_settings(text)
        except ValueError as error:
            raise ApiError(f"{name} is not valid JSON: {error}.", name) from None
    return values


@functools.cache
def field_names(kind: type[BaseModel]) -> frozenset[str]:
    """The fields of a body as clients call them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@functools.cache
def _text_fields(kind: type[BaseModel]) -> frozenset[str]:
    schemas = {name: each.get("anyOf", [each]) for name, each in kind.model_json_schema()["properties"].items()}
    return frozenset(
        name for name, kinds in schemas.items() if {each.get("type") for each in kinds} <= {"string", "null"}
    )


def json_schema(kind: type[BaseModel], files: Mapping[str, bool]) -> dict[str, Any]:
    """A body as JSON Schema, for the documentation; of its files, by name, whether they are needed."""
    schema = kind.model_json_schema()
    schema["properties"] |= {name: {"type": "string", "format": "binary"} for name in files}
    schema["required"] = [*schema.get("required", ()), *(name for name, is_needed in files.items() if is_needed)]
    return schema


def query_parameters(kind: type[BaseModel]) -> list[dict[str, Any]]:
    """Likewise of what is behind the question mark."""
    properties = kind.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]


def _sides(size: str | None) -> dict[str, Any]:
    width, _, height = (size or "auto").partition("x")
    return {"width": int(width), "height": int(height)} if height else {}


def _refused(error: ValidationError, kind: type[BaseModel], facts: PipelineFacts | None) -> ApiError:
    errors = error.errors(include_url=False)
    problem, value, place = errors[0]["type"], errors[0]["input"], errors[0]["loc"]
    name = str(place[0] if place else value)[:100]  # A name that is not valid text has no place.
    if problem == "extra_forbidden":
        return _unknown(name, [str(each)[:100] for each in place[1:]], kind, facts)
    same = [each["msg"] for each in errors if each["loc"][:1] == place[:1]]
    said = dict.fromkeys(re.sub("^(Input|String|List) should ", "", each) for each in same)
    message = f"{'.'.join(map(str, place))} should {' or '.join(said)}, not {brief(value)}."
    if problem == "string_too_long":
        message = f"{name} has {len(value)} characters; the limit is {errors[0]['ctx']['max_length']}. Shorten it."
    elif problem == "string_pattern_mismatch":
        message = _MESSAGES[name]
    elif problem == "missing":
        message = f"{name} is missing."
    return ApiError(
        message, name, _CODES.get(problem, "invalid_type" if problem.endswith("_type") else "invalid_value")
    )


def _unknown(name: str, within: list[str], kind: type[BaseModel], facts: PipelineFacts | None) -> ApiError:
    if within:
        remedy = "Adapters are registered with the server's option --lora; a request gives a name and a scale."
        return ApiError(f"{name}: {within[-1]!r} is not taken. {remedy}", name, "unknown_field")
    if facts is not None and name in facts.takes - {"prompt"}:
        why = "It is no plain value, or says how much is computed: for that there are size, n, num_frames, seconds."
        message = f"{name!r} is an argument of the pipeline that requests cannot set. {why}"
        return ApiError(message, name, "unsupported_value")
    hint = nearest(name, field_names(kind).difference(_OPENAI))
    return ApiError(f"{name!r} is not a known field. {hint}", name, "unknown_field")
