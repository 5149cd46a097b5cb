"""Which addresses does the server answer? OpenAI's for pictures, those of a service that is watched, and the page."""

from __future__ import annotations

import time
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from .. import __version__
from .failures import ERROR_SCHEMA, Refusal
from .guard import Guard
from .house import House
from .images import Images
from .metrics import Metrics
from .protocol import request_schema
from .replies import EVENT_SCHEMA, IMAGES_SCHEMA

_PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STARTED = int(time.time())


def create_app(house: House) -> ASGIApp:
    """The application: routes inside, the guard around them."""
    metrics = Metrics(house.omni.status)
    app = FastAPI(title="Samovar", version=__version__, docs_url=None, redoc_url=None)
    _add_pictures(app, house)
    _add_models(app, house)
    _add_watching(app, house, metrics)
    _add_page(app)
    _add_errors(app)
    return Guard(app, house.config, metrics.count)


def _add_pictures(app: FastAPI, house: House) -> None:
    images, limits = Images(house), house.config.limits
    for path, handler, is_edit in (("generations", images.generate, False), ("edits", images.edit, True)):
        kind = "multipart/form-data" if is_edit else "application/json"
        body = {"required": True, "content": {kind: {"schema": request_schema(limits, is_edit=is_edit)}}}
        streams = {"text/event-stream": {"schema": EVENT_SCHEMA}}
        done = {"description": "Pictures", "content": {"application/json": {"schema": IMAGES_SCHEMA}, **streams}}
        app.add_api_route(
            f"/v1/images/{path}",
            handler,
            methods=["POST"],
            openapi_extra={"requestBody": body},
            responses={200: done, **_errors(400, 401, 403, 404, 413, 415, 429, 500, 503, 504, 507)},
            response_model=None,
        )


def _add_models(app: FastAPI, house: House) -> None:
    def described() -> dict[str, Any]:
        return {"id": house.model_name, "object": "model", "created": _STARTED, "owned_by": "samovar"}

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [described()]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name != house.model_name:
            message = f"The model {name[:80]!r} is not served here. Known: {house.model_name!r}."
            raise Refusal(404, message, param="model", code="model_not_found")
        return JSONResponse(described())

    async def status() -> Response:
        house.check_not_ending()
        return JSONResponse(_status(house))

    named = {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]}
    _add(app, "/v1/models", models, _errors(401, 403))
    _add(app, "/v1/models/{model}", model, _errors(401, 403, 404), extra=named)
    _add(app, "/v1/samovar/status", status, _errors(401, 403, 503))


def _add_watching(app: FastAPI, house: House, metrics: Metrics) -> None:
    def told(problem: str | None, is_well: bool) -> Response:
        state = {"status": problem or "ok", "model": house.model_name, "restarts": house.omni.status().restarts}
        return JSONResponse(state, 200 if is_well else 503)

    async def live() -> Response:
        """Whether the process answers at all."""
        return JSONResponse({"status": "ok"})

    async def ready() -> Response:
        """Whether a request would be taken now."""
        problem = house.problem()
        return told(problem, problem is None)

    async def health() -> Response:
        """Whether the server is well, or must be replaced: neither to load nor to end makes it ill."""
        problem = house.problem()
        return told(problem, problem != "dead")

    async def figures() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    busy: dict[int | str, Any] = {503: {"description": "Loading, restarting, dead or draining"}}
    dead: dict[int | str, Any] = {503: {"description": "Dead"}}
    for path, handler, responses in (("/live", live, {}), ("/ready", ready, busy), ("/health", health, dead)):
        _add(app, path, handler, responses)
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)  # Balancers ask so too.
    text: dict[int | str, Any] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    _add(app, "/metrics", figures, text | _errors(401, 403))


def _add_page(app: FastAPI) -> None:
    """The files of the page, by name and read once: no path that a client sends is ever opened."""
    folder = resources.files(__package__) / "page"
    for file in folder.iterdir():
        kind = _PAGE_TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            app.add_api_route(path, _file_sender(file.read_bytes(), kind), methods=["GET"], include_in_schema=False)


def _file_sender(content: bytes, kind: str) -> Any:
    async def send_file() -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return send_file


def _add_errors(app: FastAPI) -> None:
    """Every error in one form, whoever raises it."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return error.response()

    async def by_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {
            404: f"There is nothing at {request.url.path[:200]!r}.",
            405: f"{request.method[:20]} is not a method of {request.url.path[:200]!r}.",
        }
        message = messages.get(error.status_code, str(error.detail)[:200])
        codes = {404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "invalid_request")
        return Refusal(error.status_code, message, code=code, headers=error.headers).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Refusal(499, "The client went away.", code="cancelled").response()  # Nobody reads it but the log.

    async def unforeseen(request: Request, error: Exception) -> Response:
        return Refusal(500, "The server failed. Its log says why.", code="internal_error").response()

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(HTTPException, by_framework)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unforeseen)


def _add(app: FastAPI, path: str, handler: Any, responses: dict[int | str, Any], extra: Any = None) -> None:
    app.add_api_route(path, handler, methods=["GET"], responses=responses, response_model=None, openapi_extra=extra)


def _errors(*codes: int) -> dict[int | str, Any]:
    content = {"application/json": {"schema": ERROR_SCHEMA}}
    return {code: {"description": "An error, in OpenAI's body", "content": content} for code in codes}


def _status(house: House) -> dict[str, Any]:
    """What the page shows: the model, what may be asked of it, and how busy it is."""
    status, limits = house.omni.status(), house.config.limits
    return {
        "version": __version__,
        "model": house.model_name,
        "problem": house.problem(),
        "defaults": house.omni.defaults.given() if house.is_loaded else {},
        "can_edit": house.omni.can_edit if house.is_loaded else False,
        "is_cached": house.is_cached,
        "limits": {
            "max_pixels": limits.max_pixels,
            "max_steps": limits.max_steps,
            "max_pictures": limits.max_pictures,
            "max_prompt_characters": limits.max_prompt_characters,
        },
        "queued": status.queued,
        "running": status.running,
        "max_queue": house.omni.config.max_queue,
        "restarts": status.restarts,
        "memory_bytes": status.memory_bytes,
        "pictures": status.pictures,
        "steps_computed": status.steps_computed,
        "steps_skipped": status.steps_skipped,
    }
