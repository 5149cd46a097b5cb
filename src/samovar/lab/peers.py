"""Which caches of other projects run on this model? Those of diffusers and cache-dit, if they are installed.

Each gets the settings that its authors recommend, and weaker and stronger ones around them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

from ..arch import find_denoisers
from ..core.errors import ModelError
from .image_runner import ImageRunner, Task
from .methods import Method, Notes

Settings = dict[str, Any]


class PeerGuard(AbstractContextManager["PeerGuard"]):
    """Keeps an error of a peer, which may raise anything on a model that it does not know, and lets ours pass."""

    def __init__(self, method: Method) -> None:
        self._is_peer = method.is_peer
        self.problem: str | None = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not (self._is_peer and isinstance(error, Exception)):
            return False
        self.problem = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        return True


def peers(runner: ImageRunner, tasks: Sequence[Task]) -> list[Method]:
    """All that are installed. MagCache needs figures of the model, which it measures on these tasks when it is used."""
    import diffusers

    dtype = functools.partial(getattr, next(next(iter(runner.denoisers.values())).parameters()), "dtype")
    ratios = functools.cache(lambda: _mag_ratios(runner, tasks))
    found: list[Method] = []
    settings: Settings

    def add(family: str, config: str, name: str, settings: Settings, is_adaptive: bool = False, **more: Any) -> None:
        if config in dir(diffusers):
            found.append(_of_diffusers(f"diffusers {family}", config, name, settings, is_adaptive, **more))

    for threshold in (0.03, 0.05, 0.08, 0.12, 0.2):
        add("FirstBlockCache", "FirstBlockCacheConfig", f"{threshold}", {"threshold": threshold}, True)
    for interval in (2, 3, 4, 5, 6):
        settings = {"cache_interval": interval, "disable_cache_before_step": 4, "max_order": 1, "use_lite_mode": True}
        # Factors in the model's own dtype can only help it.
        add("TaylorSeer lite", "TaylorSeerCacheConfig", f"every {interval}", settings, taylor_factors_dtype=dtype)
    for threshold, most in ((0.06, 3), (0.12, 3), (0.24, 4), (0.5, 5)):
        settings = {"threshold": threshold, "max_skip_steps": most, "num_inference_steps": runner.steps}
        add("MagCache", "MagCacheConfig", f"{threshold}, at most {most}", settings, mag_ratios=ratios)
    # With its defaults. It needs pipelines that pass it step and noise level; with others it computes everything.
    add("SeaCache", "SeaCacheConfig", "default", {}, True)
    if find_spec("cache_dit") is not None:
        found += [_of_cache_dit(threshold, order) for order in (0, 1) for threshold in (0.05, 0.08, 0.12, 0.2)]
    return found


def _of_diffusers(
    family: str, config: str, name: str, settings: Settings, is_adaptive: bool, **more: Callable[[], Any]
) -> Method:
    """`more` are arguments that are computed when the cache is attached."""

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Notes]:
        import diffusers

        values = {key: value() for key, value in more.items()}
        with contextlib.ExitStack() as undo:
            for denoiser in find_denoisers(pipeline).values():
                undo.callback(_disable, denoiser)
                denoiser.enable_cache(getattr(diffusers, config)(**settings, **values))  # type: ignore[operator]
            yield lambda: None

    return Method(f"{family} {name}", family, settings, attached, is_adaptive=is_adaptive, is_peer=True)


def _disable(denoiser: Any) -> None:
    if getattr(denoiser, "is_cache_enabled", False):  # After refused settings it is off.
        denoiser.disable_cache()


def _mag_ratios(runner: ImageRunner, tasks: Sequence[Task]) -> list[float]:
    """The ratios of the first branch, which MagCache prints when it calibrates."""
    settings = {"calibrate": True, "num_inference_steps": runner.steps}
    method = _of_diffusers("diffusers MagCache", "MagCacheConfig", "calibration", settings, False)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), runner.under(method) as make:
        make(tasks)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("[") and line.endswith("]")]
    if not lines:
        raise ModelError(f"MagCache printed no ratios for {len(tasks)} images of {runner.steps} steps.")
    ratios: list[float] = ast.literal_eval(lines[0])
    return ratios


def _of_cache_dit(threshold: float, order: int) -> Method:
    family = f"cache-dit DBCache{' + Taylor' if order else ''}"
    settings = {
        "Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 4, "residual_diff_threshold": threshold,
        "enable_separate_cfg": True,
    }  # fmt: skip

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Notes]:
        import cache_dit  # type: ignore[import-not-found, import-untyped, unused-ignore]

        for logger in [name for name in logging.root.manager.loggerDict if name.startswith("cache_dit")]:
            logging.getLogger(logger).setLevel(logging.ERROR)
        calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        try:
            # It may have changed the pipeline before it fails.
            cache_dit.enable_cache(
                pipeline, cache_config=cache_dit.DBCacheConfig(**settings), calibrator_config=calibrator
            )
            yield lambda: None
        finally:
            cache_dit.disable_cache(pipeline)

    about = {**settings, "taylorseer_order": order}
    return Method(f"{family} {threshold}", family, about, attached, is_adaptive=True, is_peer=True)
