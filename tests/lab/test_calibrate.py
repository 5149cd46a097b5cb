"""A polynomial is found where there is one, and refused where there is none; a run is watched without a trace."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lab.tiny import TASKS, MakeSession, exact_images
from samovar.cache import TeaCacheBackend, TeaCacheConfig
from samovar.core.errors import SettingError
from samovar.lab.calibrate import Changes, Fit, calibrate, fit
from samovar.lab.methods import EXACT


def fitted(curve: list[float], noise: float) -> Fit:
    """To the signals and outputs of a known polynomial, lowest power first."""
    rng = np.random.default_rng(0)
    images: list[Changes] = []
    for _ in range(6):
        x = rng.uniform(0.02, 0.3, 30)
        images.append((x.tolist(), (np.polynomial.polynomial.polyval(x, curve) + rng.normal(0, noise, 30)).tolist()))
    return fit(images)


def test_a_polynomial_is_found_again_with_no_higher_degree_than_needed() -> None:
    curve = [0.05, 1.5, -4.0, 20.0, 8.0]
    found = fitted(curve, noise=0.0)
    assert found.coefficients == pytest.approx(curve[::-1], rel=1e-6)
    assert (found.degree, found.explained) == (4, pytest.approx(1.0))
    assert "100%" in found.verdict
    line = fitted([0.1, 2.0], noise=0.05)
    assert line.degree <= 2
    assert np.polyval(line.coefficients, 0.15) == pytest.approx(0.4, abs=0.02)
    assert 0.5 < line.explained < 1


def test_what_is_no_relation_is_called_none() -> None:
    assert "no better than a constant" in fitted([0.3], noise=0.1).verdict
    # Within each image nothing follows from the signal; what the fit learns of one does not hold for another.
    rng = np.random.default_rng(1)
    levels = [0.1, 0.9, 0.2, 0.8, 0.15, 0.85]
    images = [(rng.uniform(0, 1, 20).tolist(), (level + rng.normal(0, 0.01, 20)).tolist()) for level in levels]
    assert not fit(images).is_useful
    one_signal = fit([([0.2] * 5, [0.3] * 5)] * 2)
    assert (one_signal.degree, one_signal.coefficients[-1]) == (0, pytest.approx(0.3))


def test_a_model_is_calibrated_and_nothing_stays(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(steps=8, batch=1)
    runner, model = session.runner, session.runner.pipeline.transformer
    exact = exact_images(session)
    before = type(runner.pipeline), type(model), set(vars(model))
    found = calibrate(runner, TASKS[:2], session.journal)
    assert before == (type(runner.pipeline), type(model), set(vars(model)))
    assert found.num_points == 2 * 7
    report = found.to_dict(runner, "a test")
    assert report["cache"].pop("backend") == "tea_cache"
    TeaCacheConfig.read(report["cache"])
    assert set(report["coefficients"]) <= {"FluxTransformer2DModel"}
    with runner.under(EXACT) as make:
        assert torch.equal(make(TASKS[:1]).images, exact[:1])
    monkeypatch.setattr(runner, "_call", lambda *_: pytest.fail("made again"))
    assert calibrate(runner, TASKS[:2], session.journal) == found, "known from the journal"


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


def test_too_few_images_or_steps_are_refused(make_session: MakeSession) -> None:
    session = make_session(steps=1)
    with pytest.raises(SettingError, match="1 image to calibrate with; expected at least 2"):
        calibrate(session.runner, TASKS[:1], session.journal)
    with pytest.raises(SettingError, match="num_inference_steps=1; calibration"):
        calibrate(session.runner, TASKS, session.journal)
