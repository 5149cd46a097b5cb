"""The addresses: OpenAI's for images, videos and sound, probes and metrics, and the page."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from .. import __version__
from ..core.errors import SamovarError
from .decode import JSON
from .errors import ApiError, ErrorBody, api_error
from .images import ImagesBody, respond_with_images
from .job_store import VideoData
from .metrics import Metrics
from .middleware import Middleware
from .request import FORM, HttpRequest, check_type, client_request, read_values
from .respond import MEDIA_TYPES, respond_with_file
from .schemas import (
    AudioBody,
    EditBody,
    GenerationBody,
    RemixBody,
    RequestBody,
    SpeechBody,
    VideoBody,
    json_schema,
    query_parameters,
    read_texts,
    schema_of,
)
from .state import AppState
from .video_jobs import FILES
from .videos import ContentQuery, DeletedVideo, PageQuery, VideoList, Videos, respond_with_job

_PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STARTED = int(time.time())
_ERRORS: dict[int | str, Any] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}


class Endpoint(NamedTuple):
    """An address at which something is made."""

    path: str
    body: type[RequestBody]
    makes: str
    respond: Callable[..., Awaitable[Response]]
    answer: Mapping[str, Any]
    """What a good answer is, for the documentation."""
    types: tuple[str, ...] = (JSON,)
    files: Mapping[str, str] = {}
    """The names of files, and which inputs they are."""
    needs_image: bool = False


_IMAGES = {"model": ImagesBody, "content": {"text/event-stream": {}}}
_SOUND: Mapping[str, Any] = {"content": {kind: {} for kind in MEDIA_TYPES.values()}}
_EDITED = {"image": "image", "image[]": "image", "mask": "mask", "control_image": "control_image"}
_FILMED = {"input_reference": "image", **_EDITED, "last_image": "last_image"}
_BOTH = (FORM, JSON)
ENDPOINTS = (
    Endpoint("images/generations", GenerationBody, "image", respond_with_images, _IMAGES),
    Endpoint("images/edits", EditBody, "image", respond_with_images, _IMAGES, (FORM,), _EDITED, needs_image=True),
    Endpoint("videos", VideoBody, "video", respond_with_job, {"model": VideoData}, _BOTH, _FILMED),
    Endpoint("videos/sync", VideoBody, "video", respond_with_file, {"content": {"video/mp4": {}}}, _BOTH, _FILMED),
    Endpoint("audio/generate", AudioBody, "audio", respond_with_file, _SOUND),
    Endpoint("audio/speech", SpeechBody, "audio", respond_with_file, _SOUND),
)


def create_app(state: AppState) -> ASGIApp:
    """The application: routes inside, what is the same for all of them around."""
    metrics = Metrics(state.omni.status)
    # Since 0.162 FastAPI has spans and logs of its own: beside ours each request would be there twice, and errors would
    # be logged with what clients sent. Earlier versions take any name.
    silent: Any = {"tracing": False, "logs": False}
    app = FastAPI(
        title="Samovar", version=__version__, docs_url=None, redoc_url=None, telemetry=silent, responses=_ERRORS,
        exception_handlers=dict.fromkeys((SamovarError, HTTPException, ClientDisconnect, Exception), _refused),
    )  # fmt: skip
    for endpoint in ENDPOINTS:
        _add_endpoint(app, state, endpoint)
    _add_videos(app, Videos(state))
    _add_models(app, state)
    _add_probes(app, state, metrics)
    _add_page(app)
    app.openapi()  # Kept from now on. It takes a tenth of a second, in which nobody would be served.
    return Middleware(app, state.config, metrics.count)


def _add_endpoint(app: FastAPI, state: AppState, endpoint: Endpoint) -> None:
    async def make(http: HttpRequest) -> Response:
        kind = check_type(http, *endpoint.types)
        state.check_open(endpoint.makes)
        if endpoint.needs_image:
            state.check_can_edit()
        if endpoint.respond is not respond_with_job:  # Which has a queue of its own.
            state.omni.check_room()  # Before the body is received.
        values, images = await read_values(state, http, kind, endpoint.files)
        if kind == FORM:
            values = read_texts(state.schema(endpoint.body), values)
        if endpoint.needs_image and "image" not in images:
            raise ApiError("image is missing. Send it as a file.", "image")
        return await endpoint.respond(http, client_request(state, endpoint.body, values, images))

    schema = schema_of(endpoint.body, state.config.limits)
    files = {name: name == "image" and endpoint.needs_image for name in endpoint.files if not name.endswith("[]")}
    content = {kind: {"schema": json_schema(schema, files if kind == FORM else {})} for kind in endpoint.types}
    _add(app, "POST", endpoint.path, make, endpoint.answer, requestBody={"required": True, "content": content})


def _add_videos(app: FastAPI, videos: Videos) -> None:
    remix = {"required": True, "content": {JSON: {"schema": RemixBody.model_json_schema()}}}
    files: dict[str, Any] = {"content": {kind: {} for _, kind in FILES.values()}}
    video, one = {"model": VideoData}, "videos/{video_id}"
    _add(app, "POST", f"{one}/remix", videos.remix, video, requestBody=remix)
    _add(app, "GET", "videos", videos.page, {"model": VideoList}, parameters=query_parameters(PageQuery))
    _add(app, "GET", one, videos.retrieve, video)
    _add(app, "DELETE", one, videos.delete, {"model": DeletedVideo})
    _add(app, "GET", f"{one}/content", videos.content, files, parameters=query_parameters(ContentQuery))


def _add(app: FastAPI, method: str, path: str, handler: Any, answer: Mapping[str, Any], **described: Any) -> None:
    app.add_api_route(f"/v1/{path}", handler, methods=[method], responses={200: dict(answer)}, response_model=None,
                      openapi_extra=described)  # fmt: skip


def _add_models(app: FastAPI, state: AppState) -> None:
    def described(name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": _STARTED, "owned_by": "samovar", **_made(state)}
        return model | {"parent": state.model_name} if name in state.adapters else model

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(name) for name in (*state.model_names, *state.adapters)]}

    async def model(model: str) -> dict[str, Any]:
        state.check_model(model)
        return described(model)

    async def status() -> dict[str, Any]:
        if state.phase == "draining":
            state.check_open()
        return _status(state)

    _add(app, "GET", "models", models, {})
    _add(app, "GET", "models/{model}", model, {})
    _add(app, "GET", "samovar/status", status, {})


def _add_probes(app: FastAPI, state: AppState, metrics: Metrics) -> None:
    def report(*well: str) -> Response:
        status, problem = state.omni.status(), state.problem() or "ok"
        body = {"status": problem, "model": state.model_name, "restarts": status.restarts, **_made(state),
                "replicas": len(status.replicas), "replicas_ready": status.replicas_ready}  # fmt: skip
        return JSONResponse(body, 200 if problem in well else 503)

    async def live() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    async def ready() -> Response:
        """Whether a request would be taken now."""
        return report("ok")

    async def health() -> Response:
        """Whether the server must be replaced; loading and draining are healthy."""
        return report("ok", "loading", "draining", "restarting")

    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    for path, handler in {"/live": live, "/ready": ready, "/health": health, "/metrics": prometheus}.items():
        app.get(path, response_model=None)(handler)
        app.head(path, include_in_schema=False, response_model=None)(handler)  # Some load balancers do.


def _add_page(app: FastAPI) -> None:
    """The page's files, by name and read once: no path from a client is ever opened. And what can be asked for, as a
    page without scripts: FastAPI's own loads them from elsewhere."""
    for file in (resources.files(__package__) / "page").iterdir():
        media_type = _PAGE_TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            response = Response(file.read_bytes(), media_type=media_type, headers={"Cache-Control": "no-cache"})
            app.add_route(path, response, methods=["GET"], include_in_schema=False)  # type: ignore[arg-type]

    async def docs() -> Response:
        head = "<!doctype html><meta charset=utf-8><title>Samovar</title><link rel=stylesheet href=/page/page.css>"
        parts = [f"<h2>{escape(path)}</h2><pre>{escape(json.dumps(about, indent=1))}</pre>"
                 for path, about in app.openapi()["paths"].items()]  # fmt: skip
        return Response(f"{head}<p><a href=/openapi.json>openapi.json</a></p>{''.join(parts)}", media_type="text/html")

    app.add_api_route("/docs", docs, include_in_schema=False)


async def _refused(http: HttpRequest, error: Exception) -> Response:
    path = repr(http.url.path[:200])
    match error:
        case SamovarError():
            refused = api_error(error)
        case HTTPException(status_code=404):
            refused = ApiError(f"There is nothing at {path}.", None, "not_found", 404)
        case HTTPException(status_code=405):
            message = f"{path} does not support the method {http.method[:20]}."
            refused = ApiError(message, None, "method_not_allowed", 405, error.headers)
        case ClientDisconnect():
            refused = ApiError("The client went away.", None, "cancelled", 499)  # For the log alone.
        case _:
            refused = ApiError("The server failed. Its log says why.", None, "internal_error", 500)
    return refused.response()


def _made(state: AppState) -> dict[str, str]:
    """What the model makes, once it is known."""
    return {"output": str(state.omni.output)} if state.is_loaded else {}


def _status(state: AppState) -> dict[str, Any]:
    """What the page shows: the model, its limits, and how busy it is."""
    omni = state.omni
    loaded = state.is_loaded
    return {
        **asdict(omni.status()),
        "version": __version__,
        "model": state.model_name,
        "problem": state.problem(),
        "is_cached": state.cache is not None,
        "adapters": state.adapters,
        "limits": asdict(state.config.limits),
        "max_queue": omni.config.max_queue,
        "defaults": omni.defaults.given() if loaded else {},
        "can_edit": loaded and omni.can_edit,
        "output": omni.output.kind if loaded else None,
        "seconds": state.usual_size.seconds if loaded else None,
        "inputs": omni.facts.inputs.takes if loaded else (),
    }
