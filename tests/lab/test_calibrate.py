"""A polynomial is found where there is one, and refused where there is none; a run is watched without a trace."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lab.tiny import TASKS, MakeSession, exact_images
from samovar.cache import TeaCacheBackend, TeaCacheConfig
from samovar.core.errors import SettingError
from samovar.lab.calibrate import calibrate, fit
from samovar.lab.methods import EXACT


def points(curve: list[float], noise: float, images: int = 6, seed: int = 0) -> list[tuple[list[float], list[float]]]:
    """Signals and outputs of a known polynomial, lowest power first."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(images):
        x = rng.uniform(0.02, 0.3, 30)
        found.append((x.tolist(), (np.polynomial.polynomial.polyval(x, curve) + rng.normal(0, noise, 30)).tolist()))
    return found


def test_a_known_polynomial_is_found_again() -> None:
    curve = [0.05, 1.5, -4.0, 20.0, 8.0]
    found = fit(points(curve, noise=0.0))
    assert found.coefficients == pytest.approx(curve[::-1], rel=1e-6)
    assert found.degree == 4
    assert found.explained == pytest.approx(1.0)
    assert found.is_useful
    assert "100%" in found.verdict
    assert 0.02 <= found.signal_from < found.signal_to <= 0.3


def test_no_higher_degree_than_the_points_call_for() -> None:
    found = fit(points([0.1, 2.0], noise=0.05))
    assert found.degree <= 2
    assert found.coefficients[:2] == (0.0, 0.0)
    assert np.polyval(found.coefficients, 0.15) == pytest.approx(0.4, abs=0.02)
    assert 0.5 < found.explained < 1


def test_noise_is_called_no_better_than_a_constant() -> None:
    found = fit(points([0.3], noise=0.1, images=8))
    assert not found.is_useful
    assert found.explained < 0.05
    assert "no better than a constant" in found.verdict


def test_images_of_different_levels_do_not_pass_for_a_relation() -> None:
    """Within each image nothing follows from the signal; what the fit learns of one does not hold for another."""
    rng = np.random.default_rng(1)
    levels = [0.1, 0.9, 0.2, 0.8, 0.15, 0.85]
    images = [(rng.uniform(0, 1, 20).tolist(), (level + rng.normal(0, 0.01, 20)).tolist()) for level in levels]
    assert not fit(images).is_useful


def test_one_signal_alone_determines_no_curve() -> None:
    found = fit([([0.2] * 5, [0.3] * 5), ([0.2] * 5, [0.3] * 5)])
    assert found.degree == 0
    assert found.coefficients == (0.0, 0.0, 0.0, 0.0, pytest.approx(0.3))


def test_a_model_is_calibrated_and_nothing_stays(make_session: MakeSession) -> None:
    session = make_session(steps=8, batch=1)
    runner, model = session.runner, session.runner.pipeline.transformer
    exact = exact_images(session)
    before = type(runner.pipeline), type(model), set(vars(model))
    found = calibrate(runner, TASKS[:2], session.journal)
    assert before == (type(runner.pipeline), type(model), set(vars(model)))
    assert found.num_points == 2 * 7
    report = found.to_dict(runner, "a test")
    assert report["cache"].pop("backend") == "tea_cache"
    assert report["num_inference_steps"] == 8
    TeaCacheConfig.read(report["cache"])
    assert set(report["coefficients"]) <= {"FluxTransformer2DModel"}
    with runner.under(EXACT) as make:
        assert torch.equal(make(TASKS[:1]).images, exact[:1])


def test_changes_are_those_of_signal_and_output(make_session: MakeSession) -> None:
    session = make_session(steps=6)
    runner, outputs = session.runner, list[torch.Tensor]()
    calibrate(runner, TASKS[:2], session.journal)
    signal, output = session.journal["changes 0"]
    handle = runner.pipeline.transformer.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    backend = TeaCacheBackend({"rel_l1_thresh": 1e-30, "min_steps": 0, "last_steps": 0})
    try:
        with backend.enable(runner.pipeline), runner.under(EXACT) as make:
            make(TASKS[:1])
            records = backend.stats().denoisers["transformer"].branches["cond"].steps
    finally:
        handle.remove()
    changes = [float((b - a).abs().mean() / a.abs().mean()) for a, b in itertools.pairwise(outputs[::2])]
    assert signal == pytest.approx([r.distance for r in records[1:]], rel=1e-4)
    assert output == pytest.approx(changes, rel=1e-4)


def test_an_interrupted_calibration_goes_on(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(steps=4)
    first = calibrate(session.runner, TASKS, session.journal)
    monkeypatch.setattr(session.runner, "_call", lambda *_: pytest.fail("made again"))
    assert calibrate(session.runner, TASKS, session.journal) == first


def test_nonsense_is_refused(make_session: MakeSession) -> None:
    session = make_session(steps=1)
    with pytest.raises(SettingError, match="1 image to calibrate with; expected at least 2"):
        calibrate(session.runner, TASKS[:1], session.journal)
    with pytest.raises(SettingError, match="num_inference_steps=1; calibration"):
        calibrate(session.runner, TASKS, session.journal)
