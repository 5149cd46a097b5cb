"""What a pipeline's call takes, also where it hands its arguments on."""

from __future__ import annotations

from typing import Any

import diffusers

from samovar.arch.calls import call_parameters


def test_the_call_of_a_pipeline_takes_what_its_signature_says() -> None:
    found = call_parameters(diffusers.FluxPipeline)
    assert {"prompt", "height", "num_inference_steps"} <= set(found)
    assert "self" not in found
    assert found["num_inference_steps"].default == 28


def test_a_call_with_kwargs_takes_what_its_parents_take() -> None:
    class Logged(diffusers.FluxPipeline):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class Quick(Logged):
        def __call__(self, prompt: str, num_inference_steps: int = 4, **kwargs: Any) -> Any:
            return super().__call__(prompt, num_inference_steps=num_inference_steps, **kwargs)

    of_all = set(call_parameters(diffusers.FluxPipeline))
    assert set(call_parameters(Logged)) == set(call_parameters(Quick)) == of_all
    assert call_parameters(Quick)["num_inference_steps"].default == 4, "the nearest counts"


def test_a_call_without_kwargs_takes_no_more_than_it_says() -> None:
    class Narrow(diffusers.FluxPipeline):  # type: ignore[misc]
        def __call__(self, prompt: str) -> Any:
            return super().__call__(prompt)

    assert set(call_parameters(Narrow)) == {"prompt"}
    assert call_parameters(object) == {}
