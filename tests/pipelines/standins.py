"""Stand-ins for packages that cannot be used here: only parts of them that nothing is checked by.

- The processors of Qwen's vision models have a part for videos, which needs torchvision; no pipeline gives them one.
- OmniGen prepares images with torchvision; here it gets none.
- Cosmos pipelines show a prompt and a video to the models of cosmos_guardrail, which are downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock


class Guard:
    """Finds nothing to object to."""

    def to(self, *args: Any) -> Guard:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


@contextlib.contextmanager
def standins() -> Iterator[None]:
    """For as long as this is entered, pipelines that need these packages can be built, loaded and run."""
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("torchvision") is None:
            stack.enter_context(_processors_without_videos())
            stack.enter_context(_omnigen_without_images())
        if importlib.util.find_spec("cosmos_guardrail") is None:
            for name, module in list(sys.modules.items()):
                if name.startswith("diffusers.pipelines.cosmos.pipeline_"):
                    stack.enter_context(mock.patch.object(module, "CosmosSafetyChecker", Guard, create=True))
        yield


@contextlib.contextmanager
def _processors_without_videos() -> Iterator[None]:
    from transformers import ProcessorMixin

    attributes = ProcessorMixin.get_attributes.__func__  # type: ignore[attr-defined]

    def without_videos(cls: Any) -> list[str]:
        return [name for name in attributes(cls) if name != "video_processor"]

    with mock.patch.object(ProcessorMixin, "get_attributes", classmethod(without_videos)):
        yield


@contextlib.contextmanager
def _omnigen_without_images() -> Iterator[None]:
    from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen

    processor = processor_omnigen.OmniGenMultiModalProcessor
    transforms = types.SimpleNamespace(
        **{name: mock.Mock(name=name) for name in ("Compose", "Lambda", "ToTensor", "Normalize")}
    )
    with (
        mock.patch.object(pipeline_omnigen, "OmniGenMultiModalProcessor", processor, create=True),
        mock.patch.object(processor_omnigen, "transforms", transforms, create=True),
    ):
        yield
