"""The exception tree and the hint for an unknown name."""

from __future__ import annotations

import inspect
import pickle

import pytest

from samovar.core import errors


def test_every_error_is_in_the_drawing_and_under_the_root() -> None:
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    for cls in classes:
        assert issubclass(cls, errors.SamovarError)
        assert cls.__name__ in errors.__doc__
    assert issubclass(errors.SettingError, ValueError)
    assert issubclass(errors.HookConflictError, RuntimeError)


def test_errors_of_the_engine_have_a_code_each_and_travel_with_what_they_know() -> None:
    kinds = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.EngineError)]
    assert len({cls.code for cls in kinds}) == len(kinds) == 10
    for cls in kinds:
        extra = {"QueueFullError": (2.5,), "NanLatentsError": (3, "#.#")}.get(cls.__name__, ())
        error = cls("what happened", *extra)
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is cls
        assert str(copy) == "what happened"
        assert vars(copy) == vars(error)
        assert isinstance(copy, RuntimeError)
    full = pickle.loads(pickle.dumps(errors.QueueFullError("full", 2.5)))
    assert (full.code, full.retry_after_s) == ("queue_full", 2.5)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("tea_cahe", ["tea_cache", "cache_dit"], "Did you mean 'tea_cache'?"),
        ("TEA_CACHE", ["tea_cache", "cache_dit"], "Did you mean 'tea_cache'?"),
        ("xyz", ["tea_cache", "cache_dit"], "Known: 'cache_dit', 'tea_cache'."),
        ("Latte", ["LattePipeline", "LatteTransformer3DModel"], "'LattePipeline' or 'LatteTransformer3DModel'?"),
        ("steps", ["num_inference_steps", "seed"], "Did you mean 'num_inference_steps'?"),
        (
            "Flux",
            ["Flux2KleinPipeline", "FluxPipeline", "Flux2Pipeline"],
            "'FluxPipeline' or 'Flux2Pipeline' or 'Flux2KleinPipeline'?",
        ),
        ("q", [f"a{i:02}" for i in range(24)], "None of the 24 known names is similar."),
        ("anything", [], "None is known."),
    ],
)
def test_nearest(name: str, known: list[str], hint: str) -> None:
    assert errors.nearest(name, known).endswith(hint)
