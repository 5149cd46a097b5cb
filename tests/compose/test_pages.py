"""What the pages about composing, new models and other libraries say is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines import PIPELINES
from samovar.arch.declarations import DECLARATIONS
from samovar.cache import EXTRACTOR_REGISTRY

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("compose.md", "new-model.md", "coming-from.md")
BLOCKS = [
    pytest.param(page, code, id=f"{page} {number}")
    for page in PAGES
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL), start=1
    )
]


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What a reader has at hand: a pipeline. What he declares is forgotten afterwards."""
    declared, extracted = dict(DECLARATIONS), dict(EXTRACTOR_REGISTRY)
    pipe = PIPELINES["flux"].build(0)
    usual = type(pipe).__call__

    def small(self: Any, prompt: str, **given: Any) -> Any:
        """The call of the page, at a size for a test."""
        size = {"height": 16, "width": 16, "max_sequence_length": 8, "num_inference_steps": 8}
        return usual(self, prompt, **given | size)

    pipe.__class__ = type("FluxPipeline", (type(pipe),), {"__call__": small})
    yield {"__name__": "page", "pipe": pipe}
    for registry, before in ((DECLARATIONS, declared), (EXTRACTOR_REGISTRY, extracted)):
        registry.clear()
        registry.update(before)  # type: ignore[arg-type]


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_python_of_the_pages_runs(page: str, code: str, names: dict[str, Any]) -> None:
    # The compiler of torch takes half a minute for what a plain one shows as well.
    exec(compile(code.replace("compile=True", 'compile="eager"'), page, "exec"), names)


def test_every_page_has_something_to_run() -> None:
    assert {block.values[0] for block in BLOCKS} == set(PAGES)
