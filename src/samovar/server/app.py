"""The addresses: OpenAI's for images, videos and sound, probes and metrics, and the page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from html import escape
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from .. import __version__
from .audio import TYPES, Sounds
from .decode_worker import JSON
from .errors import ApiError, ErrorBody
from .images import Images
from .metrics import Metrics
from .middleware import Middleware
from .output_size import output_size
from .request import FORM
from .respond import EventBody, ImagesBody
from .schemas import AudioBody, EditBody, GenerationBody, RemixBody, SpeechBody, VideoBody, request_schema
from .state import AppState
from .video_jobs import VARIANTS
from .videos import DeletedVideo, VideoData, VideoList, Videos

_PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STARTED = int(time.time())
_FOR_JOBS, _FOR_ALL = (400, 401, 403, 404, 503), (401, 403)
_FOR_MAKING = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504, 507)


def create_app(state: AppState) -> ASGIApp:
    """The application: routes inside, what is the same for all of them around."""
    metrics = Metrics(state.omni.status)
    # Since 0.162 FastAPI has spans and logs of its own: beside ours each request would be there twice, and errors would
    # be logged with what clients sent. Earlier versions take any name.
    silent: Any = {"tracing": False, "logs": False}
    app = FastAPI(title="Samovar", version=__version__, docs_url=None, redoc_url=None, telemetry=silent)
    _add_making(app, state)
    _add_models(app, state)
    _add_probes(app, state, metrics)
    _add_page(app)
    _add_docs(app)
    _add_error_handlers(app)
    app.openapi()  # Kept from now on. It takes a tenth of a second, in which nobody would be served.
    return Middleware(app, state.config, metrics.count)


def _add_making(app: FastAPI, state: AppState) -> None:
    images, videos, sounds, limits = Images(state), Videos(state), Sounds(state), state.config.limits
    stream = {"content": {"text/event-stream": {"schema": EventBody.model_json_schema()}}}
    edit_files = {"image": True, **dict.fromkeys(("mask", "control_image"), False)}
    files = dict.fromkeys(("input_reference", "last_image", "mask", "control_image"), False)
    video = {JSON: request_schema(VideoBody, limits), FORM: request_schema(VideoBody, limits, files)}
    made, job = {"model": ImagesBody, **stream}, {"model": VideoData}
    sound: dict[str, Any] = {"content": {kind: {} for kind in TYPES.values()}}
    routes: tuple[tuple[str, Callable[..., Any], dict[str, Any], dict[str, Any]], ...] = (
        ("images/generations", images.generate, {JSON: request_schema(GenerationBody, limits)}, made),
        ("images/edits", images.edit, {FORM: request_schema(EditBody, limits, edit_files)}, made),
        ("videos", videos.create, video, job),
        ("videos/sync", videos.create_now, video, {"content": {"video/mp4": {}}}),
        ("videos/{video_id}/remix", videos.remix, {JSON: RemixBody.model_json_schema()}, job),
        ("audio/generate", sounds.generate, {JSON: request_schema(AudioBody, limits)}, sound),
        ("audio/speech", sounds.speak, {JSON: request_schema(SpeechBody, limits)}, sound),
    )
    for path, handler, schemas, answer in routes:
        content = {kind: {"schema": schema} for kind, schema in schemas.items()}
        body = {"requestBody": {"required": True, "content": content}}
        _add(app, "POST", f"/v1/{path}", handler, answer, _FOR_MAKING, openapi_extra=body)
    content = {kind: {} for _, kind in VARIANTS.values()}
    for path, method, handler, answer in (
        ("", "GET", videos.page, {"model": VideoList}),
        ("/{video_id}", "GET", videos.retrieve, job),
        ("/{video_id}", "DELETE", videos.delete, {"model": DeletedVideo}),
        ("/{video_id}/content", "GET", videos.content, {"content": content}),
    ):
        _add(app, method, f"/v1/videos{path}", handler, answer, _FOR_JOBS)


def _add(
    app: FastAPI,
    method: str,
    path: str,
    handler: Callable[..., Any],
    answer: dict[str, Any],
    errors: tuple[int, ...],
    **more: Any,
) -> None:
    answers: dict[int | str, dict[str, Any]] = {200: answer, **{code: {"model": ErrorBody} for code in errors}}
    app.add_api_route(path, handler, methods=[method], responses=answers, response_model=None, **more)


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
        state.check_not_draining()
        return _status(state)

    _add(app, "GET", "/v1/models", models, {}, _FOR_ALL)
    _add(app, "GET", "/v1/models/{model}", model, {}, (*_FOR_ALL, 404))
    _add(app, "GET", "/v1/samovar/status", status, {}, (*_FOR_ALL, 503))


def _add_probes(app: FastAPI, state: AppState, metrics: Metrics) -> None:
    def report(problem: str | None, well: tuple[str | None, ...]) -> Response:
        status = state.omni.status()
        body = {"status": problem or "ok", "model": state.model_name, "restarts": status.restarts, **_made(state)}
        body |= {"replicas": len(status.replicas), "replicas_ready": status.replicas_ready}
        return JSONResponse(body, 200 if problem in well else 503)

    async def live() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    async def ready() -> Response:
        """Whether a request would be taken now."""
        return report(state.problem(), (None,))

    async def health() -> Response:
        """Whether the server must be replaced; loading and draining are healthy."""
        return report(state.problem(), (None, "loading", "draining", "restarting"))

    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    unwell: dict[int | str, Any] = {503: {"description": "It does not"}}
    for path, handler, responses in (("/live", live, {}), ("/ready", ready, unwell), ("/health", health, unwell)):
        app.add_api_route(path, handler, methods=["GET"], responses=responses, response_model=None)
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)  # Some load balancers do.
    _add(app, "GET", "/metrics", prometheus, {"content": {"text/plain": {}}}, _FOR_ALL, response_class=Response)


def _add_page(app: FastAPI) -> None:
    """The page's files, by name and read once: no path from a client is ever opened."""
    folder = resources.files(__package__) / "page"
    for file in folder.iterdir():
        media_type = _PAGE_TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            response = Response(file.read_bytes(), media_type=media_type, headers={"Cache-Control": "no-cache"})
            app.add_route(path, response, methods=["GET"], include_in_schema=False)  # type: ignore[arg-type]


def _add_docs(app: FastAPI) -> None:
    """What can be asked for, as a page without scripts: FastAPI's own loads them from elsewhere."""

    async def docs() -> Response:
        methods = [(path, *item) for path, items in app.openapi()["paths"].items() for item in items.items()]
        parts = [f"<h2>{method.upper()} {path}</h2><pre>{escape(json.dumps(about, indent=1))}</pre>"
                 for path, method, about in methods]  # fmt: skip
        head = "<!doctype html><meta charset=utf-8><title>Samovar</title><link rel=stylesheet href=/page/page.css>"
        return Response(f"{head}<p><a href=/openapi.json>openapi.json</a></p>{''.join(parts)}", media_type="text/html")

    app.add_api_route("/docs", docs, include_in_schema=False)


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
        "seconds": output_size(state.omni.facts).seconds if state.is_loaded else None,
        "inputs": state.omni.facts.inputs.takes if state.is_loaded else (),
        "is_cached": state.is_cached,
        "adapters": state.adapters,
        "limits": asdict(state.config.limits),
        "max_queue": state.omni.config.max_queue,
    }
