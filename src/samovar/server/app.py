"""Which addresses does the server answer? OpenAI's for images, probes and metrics, and the page."""

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
from .bodies import EditBody, GenerationBody, request_schema
from .guard import Guard
from .images import Images
from .metrics import Metrics
from .responses import EventBody, ImagesBody

_PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STARTED = int(time.time())


def create_app(state: AppState) -> ASGIApp:
    """The application: routes inside, the guard around them."""
    metrics = Metrics(state.omni.status)
    app = FastAPI(title="Samovar", version=__version__, docs_url=None, redoc_url=None)
    _add_images(app, state)
    _add_models(app, state)
    _add_probes(app, state, metrics)
    _add_page(app)
    _add_error_handlers(app)
    app.openapi()  # Kept from now on. It takes a tenth of a second, in which nobody would be served.
    return Guard(app, state.config, metrics.count)


def _add_images(app: FastAPI, state: AppState) -> None:
    images = Images(state)
    stream = {"content": {"text/event-stream": {"schema": EventBody.model_json_schema()}}}
    for path, handler, media_type, body in (
        ("generations", images.generate, "application/json", GenerationBody),
        ("edits", images.edit, "multipart/form-data", EditBody),
    ):
        schema = request_schema(body, state.config.limits)
        app.add_api_route(
            f"/v1/images/{path}",
            handler,
            methods=["POST"],
            openapi_extra={"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}},
            responses={
                200: {"model": ImagesBody, **stream},
                **_errors(400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504, 507),
            },
            response_model=None,
        )


def _add_models(app: FastAPI, state: AppState) -> None:
    def described(name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": _STARTED, "owned_by": "samovar"}
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
        body = {"status": problem or "ok", "model": state.model_name, "restarts": state.omni.status().restarts}
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


def _status(state: AppState) -> dict[str, Any]:
    """What the page shows: the model, its limits, and how busy it is."""
    return {
        **asdict(state.omni.status()),
        "version": __version__,
        "model": state.model_name,
        "problem": state.problem(),
        "defaults": state.omni.defaults.given() if state.is_loaded else {},
        "can_edit": state.omni.can_edit if state.is_loaded else False,
        "is_cached": state.is_cached,
        "adapters": state.adapters,
        "limits": asdict(state.config.limits),
        "max_queue": state.omni.config.max_queue,
    }
