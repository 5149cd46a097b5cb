"""Which addresses does the server answer? OpenAI's for images, videos and sound, probes and metrics, and the page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from .. import __version__
from .api_errors import ApiError, ErrorBody
from .app_state import AppState
from .asking import FORM, JSON
from .audio import TYPES, Sounds
from .bodies import AudioBody, EditBody, GenerationBody, RemixBody, SpeechBody, VideoBody, request_schema
from .extents import extent_of
from .guard import Guard
from .images import Images
from .metrics import Metrics
from .responses import EventBody, ImagesBody
from .video_jobs import VARIANTS
from .videos import DeletedVideo, VideoData, VideoList, Videos

_PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STARTED = int(time.time())
_Answers = dict[int | str, dict[str, Any]]


def create_app(state: AppState) -> ASGIApp:
    """The application: routes inside, the guard around them."""
    metrics = Metrics(state.omni.status)
    # Since 0.162 FastAPI has spans and logs of its own: beside ours each request would be there twice, and errors would
    # be logged with what clients sent. Earlier versions take any name.
    silent: Any = {"tracing": False, "logs": False}
    app = FastAPI(title="Samovar", version=__version__, docs_url=None, redoc_url=None, telemetry=silent)
    _add_images(app, state)
    _add_videos(app, state)
    _add_sounds(app, state)
    _add_models(app, state)
    _add_probes(app, state, metrics)
    _add_page(app)
    _add_error_handlers(app)
    app.openapi()  # Kept from now on. It takes a tenth of a second, in which nobody would be served.
    return Guard(app, state.config, metrics.count)


def _add_images(app: FastAPI, state: AppState) -> None:
    images = Images(state)
    stream = {"content": {"text/event-stream": {"schema": EventBody.model_json_schema()}}}
    answer: _Answers = {200: {"model": ImagesBody, **stream}}
    forms = {"image": True, **dict.fromkeys(("mask", "control_image"), False)}
    limits = state.config.limits
    _add_post(app, "/v1/images/generations", images.generate, {JSON: request_schema(GenerationBody, limits)}, answer)
    _add_post(app, "/v1/images/edits", images.edit, {FORM: request_schema(EditBody, limits, forms)}, answer)


def _add_videos(app: FastAPI, state: AppState) -> None:
    videos, limits = Videos(state), state.config.limits
    schema = request_schema(VideoBody, limits)
    files = dict.fromkeys(("input_reference", "last_image", "mask", "control_image"), False)
    both = {JSON: schema, FORM: request_schema(VideoBody, limits, files)}
    made: _Answers = {200: {"content": {"video/mp4": {}}}}
    _add_post(app, "/v1/videos", videos.create, both, {200: {"model": VideoData}})
    _add_post(app, "/v1/videos/sync", videos.create_now, both, made)
    remix = {JSON: RemixBody.model_json_schema()}
    _add_post(app, "/v1/videos/{video_id}/remix", videos.remix, remix, {200: {"model": VideoData}})
    images: _Answers = {200: {"content": {kind: {} for _, kind in VARIANTS.values()}}}
    routes: tuple[tuple[str, str, Callable[..., Any], _Answers], ...] = (
        ("/v1/videos", "GET", videos.page, {200: {"model": VideoList}}),
        ("/v1/videos/{video_id}", "GET", videos.retrieve, {200: {"model": VideoData}}),
        ("/v1/videos/{video_id}", "DELETE", videos.delete, {200: {"model": DeletedVideo}}),
        ("/v1/videos/{video_id}/content", "GET", videos.content, images),
    )
    for path, method, handler, answer in routes:
        errors = _errors(400, 401, 403, 404, 503)
        app.add_api_route(path, handler, methods=[method], responses={**answer, **errors}, response_model=None)


def _add_sounds(app: FastAPI, state: AppState) -> None:
    sounds = Sounds(state)
    answer: _Answers = {200: {"content": {kind: {} for kind in TYPES.values()}}}
    for path, handler, body in (("generate", sounds.generate, AudioBody), ("speech", sounds.speak, SpeechBody)):
        _add_post(app, f"/v1/audio/{path}", handler, {JSON: request_schema(body, state.config.limits)}, answer)


def _add_post(app: FastAPI, path: str, handler: Callable[..., Any], content: dict[str, Any], answers: _Answers) -> None:
    bodies = {media_type: {"schema": schema} for media_type, schema in content.items()}
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        openapi_extra={"requestBody": {"required": True, "content": bodies}},
        responses={**answers, **_errors(400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504, 507)},
        response_model=None,
    )


def _add_models(app: FastAPI, state: AppState) -> None:
    def described(name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": _STARTED, "owned_by": "samovar", **_made(state)}
        return model | {"parent": state.model_name} if name in state.adapters else model

    @app.get("/v1/models", responses=_errors(401, 403))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(name) for name in (*state.model_names, *state.adapters)]}

    @app.get("/v1/models/{model}", responses=_errors(401, 403, 404))
    async def model(model: str) -> dict[str, Any]:
        state.check_model(model)
        return described(model)

    @app.get("/v1/samovar/status", responses=_errors(401, 403, 503))
    async def status() -> dict[str, Any]:
        state.check_not_draining()
        return _status(state)


def _add_probes(app: FastAPI, state: AppState, metrics: Metrics) -> None:
    def report(problem: str | None, *, is_well: bool) -> Response:
        status = state.omni.status()
        body = {"status": problem or "ok", "model": state.model_name, "restarts": status.restarts, **_made(state)}
        body |= {"replicas": len(status.replicas), "replicas_ready": status.replicas_ready}
        return JSONResponse(body, 200 if is_well else 503)

    async def live() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    async def ready() -> Response:
        """Whether a request would be taken now."""
        problem = state.problem()
        return report(problem, is_well=problem is None)

    async def health() -> Response:
        """Whether the server must be replaced; loading and draining are healthy."""
        problem = state.problem()
        return report(problem, is_well=problem != "dead")

    probes: tuple[tuple[str, Callable[..., Any], str | None], ...] = (
        ("/live", live, None),
        ("/ready", ready, "Loading, restarting, dead or draining"),
        ("/health", health, "Dead"),
    )
    for path, handler, unwell in probes:
        responses: dict[int | str, Any] = {} if unwell is None else {503: {"description": unwell}}
        app.add_api_route(path, handler, methods=["GET"], responses=responses, response_model=None)
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)  # Some load balancers do.

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **_errors(401, 403)})
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)


def _add_page(app: FastAPI) -> None:
    """The page's files, by name and read once: no path from a client is ever opened."""
    folder = resources.files(__package__) / "page"
    for file in folder.iterdir():
        media_type = _PAGE_TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            response = Response(file.read_bytes(), media_type=media_type, headers={"Cache-Control": "no-cache"})
            app.add_route(path, response, methods=["GET"], include_in_schema=False)  # type: ignore[arg-type]


def _add_error_handlers(app: FastAPI) -> None:
    """Every error has the same form, whoever raises it."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def by_framework(request: Request, error: HTTPException) -> Response:
        path = repr(request.url.path[:200])
        message, code = {
            404: (f"There is nothing at {path}.", "not_found"),
            405: (f"{path} does not support the method {request.method[:20]}.", "method_not_allowed"),
        }.get(error.status_code, (str(error.detail)[:200], "invalid_request"))
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return ApiError(499, "The client went away.", code="cancelled").response()  # For the log alone.

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return ApiError(500, "The server failed. Its log says why.", code="internal_error").response()


def _errors(*codes: int) -> dict[int | str, Any]:
    return {code: {"model": ErrorBody} for code in codes}


def _made(state: AppState) -> dict[str, str]:
    """What the model makes, once it is known."""
    return {"output": str(state.omni.output)} if state.is_loaded else {}


def _status(state: AppState) -> dict[str, Any]:
    """What the page shows: the model, its limits, and how busy it is."""
    return {
        **asdict(state.omni.status()),
        "version": __version__,
        "model": state.model_name,
        "problem": state.problem(),
        "defaults": state.omni.defaults.given() if state.is_loaded else {},
        "can_edit": state.omni.can_edit if state.is_loaded else False,
        "output": state.omni.output.kind if state.is_loaded else None,
        "seconds": extent_of(state.omni.facts).seconds if state.is_loaded else None,
        "inputs": state.omni.facts.inputs.takes if state.is_loaded else (),
        "is_cached": state.is_cached,
        "adapters": state.adapters,
        "limits": asdict(state.config.limits),
        "max_queue": state.omni.config.max_queue,
    }
