"""Which caches of others run on this model? diffusers' own and cache-dit's, as far as they are installed.

Each with settings that do it justice: those that its authors recommend, and weaker and stronger ones around them.
"""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from ..arch import find_denoisers
from ..errors import ModelError
from .methods import Method, Notes
from .studio import Studio, Task

PEER_FAILS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""What a peer may raise on a model that it does not know. It says so in its row, and the others go on."""


def peers(studio: Studio, tasks: Sequence[Task]) -> list[Method]:
    """All that are installed. MagCache needs figures of the model, which it takes from these tasks."""
    import diffusers

    known = set(dir(diffusers))
    found = _first_block(diffusers) if "FirstBlockCacheConfig" in known else []
    if "TaylorSeerCacheConfig" in known:
        found += _taylor(diffusers, studio)
    if "MagCacheConfig" in known:
        found += _mag(diffusers, studio, tasks)
    if "SeaCacheConfig" in known:
        found += _sea(diffusers)
    if find_spec("cache_dit") is not None:
        found += _cache_dit()
    return found


def _of_diffusers(family: str, name: str, config: Any, settings: dict[str, Any], is_adaptive: bool) -> Method:
    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Notes]:
        denoisers = list(find_denoisers(pipeline).values())
        with contextlib.ExitStack() as undo:
            for denoiser in denoisers:
                undo.callback(_disable, denoiser)
                denoiser.enable_cache(config)  # type: ignore[operator]
            yield lambda: None

    return Method(f"{family} {name}", family, settings, attached, is_adaptive=is_adaptive, is_peer=True)


def _disable(denoiser: Any) -> None:
    if getattr(denoiser, "is_cache_enabled", False):  # Refused settings leave it off.
        denoiser.disable_cache()


def _first_block(diffusers: Any) -> list[Method]:
    return [
        _of_diffusers(
            "diffusers FirstBlockCache",
            f"{threshold}",
            diffusers.FirstBlockCacheConfig(threshold=threshold),
            {"threshold": threshold},
            True,
        )
        for threshold in (0.03, 0.05, 0.08, 0.12, 0.2)
    ]


def _taylor(diffusers: Any, studio: Studio) -> list[Method]:
    """Its factors are kept in the model's own numbers, which can only help it."""
    dtype = next(next(iter(studio.denoisers.values())).parameters()).dtype
    rows = []
    for interval in (2, 3, 4, 5, 6):
        settings = {"cache_interval": interval, "disable_cache_before_step": 4, "max_order": 1, "use_lite_mode": True}
        config = diffusers.TaylorSeerCacheConfig(taylor_factors_dtype=dtype, **settings)
        rows.append(_of_diffusers("diffusers TaylorSeer lite", f"every {interval}", config, settings, False))
    return rows


def _mag(diffusers: Any, studio: Studio, tasks: Sequence[Task]) -> list[Method]:
    try:
        ratios = _mag_ratios(diffusers, studio, tasks)
    except PEER_FAILS as error:
        return [failing("diffusers MagCache", error)]
    rows = []
    for threshold, most in ((0.06, 3), (0.12, 3), (0.24, 4), (0.5, 5)):
        settings = {"threshold": threshold, "max_skip_steps": most, "num_inference_steps": studio.steps}
        config = diffusers.MagCacheConfig(mag_ratios=ratios, **settings)
        rows.append(_of_diffusers("diffusers MagCache", f"{threshold}, at most {most}", config, settings, False))
    return rows


def _mag_ratios(diffusers: Any, studio: Studio, tasks: Sequence[Task]) -> list[float]:
    """What MagCache prints when it is asked to calibrate; of its branches the first."""
    config = diffusers.MagCacheConfig(calibrate=True, num_inference_steps=studio.steps)
    method = _of_diffusers("diffusers MagCache", "calibration", config, {}, False)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), studio.under(method) as make:
        make(tasks)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("[") and line.endswith("]")]
    if not lines:
        raise ModelError(f"MagCache found no ratios in {len(tasks)} pictures of {studio.steps} steps.")
    ratios: list[float] = ast.literal_eval(lines[0])
    return ratios


def _sea(diffusers: Any) -> list[Method]:
    """Its own default. It is for pipelines that tell it the step and the noise level, which few do: with others it
    computes everything, at any setting."""
    config = diffusers.SeaCacheConfig()
    settings = {"threshold": config.threshold, "max_consecutive_cached": config.max_consecutive_cached}
    name = f"{config.threshold}, at most {config.max_consecutive_cached}"
    return [_of_diffusers("diffusers SeaCache", name, config, settings, True)]


def _cache_dit() -> list[Method]:
    rows = []
    for order in (0, 1):
        for threshold in (0.05, 0.08, 0.12, 0.2):
            settings = {
                "Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 4,
                "residual_diff_threshold": threshold, "enable_separate_cfg": True,
            }  # fmt: skip
            family = "cache-dit DBCache" if order == 0 else "cache-dit DBCache + Taylor"
            rows.append(_of_cache_dit(family, f"{threshold}", settings, order))
    return rows


def _of_cache_dit(family: str, name: str, settings: dict[str, Any], order: int) -> Method:
    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Notes]:
        import logging

        import cache_dit  # type: ignore[import-not-found, import-untyped, unused-ignore]

        for logger in [name for name in logging.root.manager.loggerDict if name.startswith("cache_dit")]:
            logging.getLogger(logger).setLevel(logging.ERROR)
        calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        config = cache_dit.DBCacheConfig(**settings)
        try:
            # It may have changed much of the pipeline before it fails.
            cache_dit.enable_cache(pipeline, cache_config=config, calibrator_config=calibrator)
            yield lambda: None
        finally:
            cache_dit.disable_cache(pipeline)

    about = {**settings, "taylorseer_order": order}
    return Method(f"{family} {name}", family, about, attached, is_adaptive=True, is_peer=True)


def failing(family: str, error: BaseException) -> Method:
    """In place of a peer that cannot even be prepared: it fails in the same way when it is tried."""

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Notes]:
        raise error
        yield lambda: None

    return Method(family, family, {}, attached, is_peer=True)
