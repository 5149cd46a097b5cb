"""Every error of the engine has a status, and tells the client no more than is meant for it."""

from __future__ import annotations

import json

import pytest

from samovar.core import errors
from samovar.server.errors import ApiError, api_error

ENGINE_ERRORS = [
    (errors.QueueFullError("full", 2.2), 429, "3"),
    (errors.QueueTimeoutError("late"), 503, "5"),
    (errors.WorkerLostError("lost"), 503, "2"),
    (errors.ShuttingDownError("closing"), 503, "5"),
    (errors.EngineDownError("down"), 503, "30"),
    (errors.StepTimeoutError("hung"), 504, None),
    (errors.OutOfMemoryError("1024x1024 needs more"), 507, None),
    (errors.NanLatentsError("nan", 3, None), 500, None),
    (errors.CancelledRequestError("gone"), 499, None),
]


@pytest.mark.parametrize(("error", "status", "retry_after"), ENGINE_ERRORS, ids=lambda value: type(value).__name__)
def test_engine_errors_have_their_status(error: errors.EngineError, status: int, retry_after: str | None) -> None:
    refusal = api_error(error)
    assert (refusal.status, refusal.code, refusal.message) == (status, error.code, str(error))
    assert refusal.headers.get("Retry-After") == retry_after


def test_all_engine_errors_are_known() -> None:
    assert {type(error) for error, _, _ in ENGINE_ERRORS} == set(errors.EngineError.__subclasses__())


def test_what_would_fail_again_is_not_to_be_repeated() -> None:
    assert api_error(errors.OutOfMemoryError("x")).headers == {"x-should-retry": "false"}
    assert api_error(errors.NanLatentsError("x", 1, None)).headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("param", "on_the_wire"),
    [
        ("height", "size"),
        ("width", "size"),
        ("num_outputs_per_prompt", "n"),
        ("deadline_s", "deadline"),
        ("negative_prompt", "negative_prompt"),
        (None, None),
    ],
)
def test_settings_that_are_refused_are_named_as_the_client_does(param: str | None, on_the_wire: str | None) -> None:
    refusal = api_error(errors.SettingError("height is in the message, and is not read from it", param=param))
    assert (refusal.status, refusal.param) == (400, on_the_wire)


@pytest.mark.parametrize(
    "error",
    [errors.ModelError("/home/me/secret is broken"), errors.EngineError("Flux failed: /home/me/secret")],
)
def test_what_failed_inside_stays_in_the_log(error: errors.SamovarError, caplog: pytest.LogCaptureFixture) -> None:
    refusal = api_error(error)
    assert (refusal.status, refusal.message) == (500, "The engine failed. The server's log says why.")
    assert "secret" not in json.dumps(refusal.body())
    assert "/home/me/secret" in caplog.text


def test_the_body_is_openais() -> None:
    response = ApiError("not here", "model", "model_not_found", 404).response()
    assert response.status_code == 404
    assert json.loads(bytes(response.body)) == {
        "error": {"message": "not here", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    }


def test_messages_name_the_options_of_the_server_and_the_fields_of_a_request() -> None:
    hung = api_error(
        errors.StepTimeoutError("It hung. Raise step_timeout_s, or lower gpu_memory; not step_timeout_ss.")
    )
    assert hung.message == "It hung. Raise --step-timeout, or lower --gpu-memory; not step_timeout_ss."
    refused = api_error(errors.SettingError("num_outputs_per_prompt=3: give num_inference_steps or exact=True."))
    assert refused.message == 'n=3: give num_inference_steps or "cache": false.'
