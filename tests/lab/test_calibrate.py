"""A polynomial is found where there is one, and refused where there is none; branches are watched without a trace."""

from __future__ import annotations

import numpy as np
import pytest

from lab.tiny import TASKS, MakeSession
from samovar.cache import TeaCacheBackend, TeaCacheConfig
from samovar.errors import SettingError
from samovar.lab.calibrate import calibrate, fit, watched_signals


def points(curve: list[float], noise: float, pictures: int = 6, seed: int = 0) -> list[tuple[list[float], list[float]]]:
    """Signals and outputs of a known polynomial, lowest power first."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(pictures):
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
    found = fit(points([0.3], noise=0.1, pictures=8))
    assert not found.is_useful
    assert found.explained < 0.05
    assert "no better than a constant" in found.verdict


def test_pictures_of_different_levels_do_not_pass_for_a_relation() -> None:
    """Within each picture nothing follows from the signal; what the fit learns of one does not hold for another."""
    rng = np.random.default_rng(1)
    levels = [0.1, 0.9, 0.2, 0.8, 0.15, 0.85]
    pictures = [(rng.uniform(0, 1, 20).tolist(), (level + rng.normal(0, 0.01, 20)).tolist()) for level in levels]
    assert not fit(pictures).is_useful


def test_one_signal_alone_determines_no_curve() -> None:
    found = fit([([0.2] * 5, [0.3] * 5), ([0.2] * 5, [0.3] * 5)])
    assert found.degree == 0
    assert found.coefficients == (0.0, 0.0, 0.0, 0.0, pytest.approx(0.3))


def test_a_model_is_calibrated_by_branches_and_nothing_stays(make_session: MakeSession) -> None:
    session = make_session(steps=8, batch=1, tasks=TASKS[:2])
    model = session.studio.pipeline.transformer
    session.studio.warm_up(TASKS[:1])  # diffusers itself leaves something on a model when it first runs.
    before = type(session.studio.pipeline), type(model), set(vars(model))
    found = calibrate(session, "a test")
    assert set(vars(model)) ^ before[2] == set()
    assert before[:2] == (type(session.studio.pipeline), type(model))
    assert session.exact().computed == 8, "nothing was skipped"
    assert list(found.branches) == ["cond", "uncond"]
    assert found.leader == "cond"
    assert {fit.num_points for fit in found.branches.values()} == {2 * 7}
    signals = [note["branches"]["uncond"]["signal"] for note in session.notes(watched_signals())]
    assert all(value > 0 for values in signals for value in values), "the branch that follows is watched too"
    report = found.to_dict()
    TeaCacheConfig.read(report["cache"])
    assert set(report["coefficients"]) <= {"FluxTransformer2DModel"}
    assert len(report["reuse_errors"]) == 8
    bare = make_session(steps=8, batch=1, tasks=TASKS[:2], name="bare")
    assert (bare.exact_pictures() == session.exact_pictures()).all(), "watching changes nothing"


def test_signals_are_those_that_the_cache_itself_measures(make_session: MakeSession) -> None:
    session = make_session(steps=6, batch=1, tasks=TASKS[:2])
    calibrate(session, "a test")
    (first, *_) = session.notes(watched_signals())
    backend = TeaCacheBackend({"rel_l1_thresh": 1e-30, "min_steps": 0, "last_steps": 0})
    handle = backend.enable(session.studio.pipeline)
    try:
        session.studio._call(TASKS[:1], 6)
        records = backend.stats().denoisers["transformer"].branches["cond"].steps
    finally:
        handle.detach()
    assert first["branches"]["cond"]["signal"] == pytest.approx([r.distance for r in records[1:]], rel=1e-4)


def test_nonsense_is_refused(make_session: MakeSession) -> None:
    with pytest.raises(SettingError, match="one picture at a time"):
        calibrate(make_session(batch=2), "a test")
    with pytest.raises(SettingError, match="at least two were expected"):
        calibrate(make_session(batch=1, tasks=TASKS[:1], name="one"), "a test")
    with pytest.raises(SettingError, match="1 steps; at least 2 were expected"):
        calibrate(make_session(steps=1, batch=1, name="step"), "a test")
