"""How do generated parts get into a page? MkDocs calls the functions `on_...` while it builds the site.

A line `<!-- generate: NAME ARGUMENT -->` in a page is replaced by what the maker NAME returns for ARGUMENT.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # The source of this checkout, whatever is installed.

from docs.generate import code, quantised, regimes_plots, results, tables  # noqa: E402

MARKER = re.compile(r"^<!-- generate: (\w+) ?(.*?) -->$", flags=re.MULTILINE)
MAKERS: dict[str, Callable[[str], str]] = {
    "settings": code.settings,
    "api": code.api,
    "commands": code.commands,
    "error_classes": code.error_classes,
    "tree": code.source_tree,
    "changes": code.contributing,
    "headlines": tables.headlines,
    "about": results.about,
    "quality": tables.quality,
    "promises": tables.promises,
    "regimes": regimes_plots.section,
    "placement": tables.placement,
    "cache_cost": tables.cache_cost,
    "cache_runs": tables.cache_runs,
    "combined": tables.combined,
    "offload": tables.offload,
    "offload_summary": tables.offload_summary,
    "offload_models": tables.offload_models,
    "coding": tables.coding,
    "disk": tables.disk,
    "offload_peers": tables.offload_peers,
    "quantised_choices": quantised.choices,
    "quantised_quality": quantised.quality,
    "quantised_gpu": quantised.gpu,
    "quantised_bounds": quantised.bounds,
    "parallel": tables.parallel,
    "hooks": tables.hooks,
    "server": tables.server,
    "serving": tables.serving,
    "lora": tables.lora,
    "attacks": tables.attacks,
}
RESULT_LINK = re.compile(r"\]\((?:\.\./)*benchmarks/results/(\w+\.json)\)")
REPOSITORY_LINK = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+((?:src|training|tests|examples|benchmarks/\w+\.py|CHANGELOG)[^)]*)\)"
)


def expand(text: str) -> str:
    """The page with its generated parts."""
    return MARKER.sub(lambda found: MAKERS[found[1]](found[2]), text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Results are copied into the site; other files of the repository are named by their path."""
    up = "../" * page.file.src_uri.count("/")
    text = RESULT_LINK.sub(rf"]({up}results/\1)", expand(markdown))
    return REPOSITORY_LINK.sub(r"\1 (`\2`)", text)


def on_files(files: Any, config: Any) -> Any:
    """Add the results, which pages link to."""
    from mkdocs.structure.files import File

    for file in sorted(results.RESULTS.glob("*.json")):
        files.append(File.generated(config, f"results/{file.name}", abs_src_path=str(file)))
    return files
