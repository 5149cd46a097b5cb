"""Write the generated parts of pages, and help MkDocs to build the site.

    python -m docs.generate.pages    # brings all pages up to date: make pages

What stands between `<!-- generate: NAME ARGUMENT -->` and `<!-- end of generated -->` in a page is what the maker NAME
returns for ARGUMENT. It is committed, so that the pages can be read in the repository, and a test holds that it is
current. MkDocs calls the functions `on_...` while it builds the site.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # The source of this checkout, whatever is installed.

from docs.generate import code, quantised, regimes_plots, results, tables  # noqa: E402

END = "<!-- end of generated -->"
MARKER = re.compile(
    rf"^(<!-- generate: (\w+) ?([^\n]*?) -->)\n(?:(?:(?!<!-- generate).)*?^{END}$\n?)?", flags=re.MULTILINE | re.DOTALL
)
MAKERS: dict[str, Callable[[str], str]] = {
    "settings": code.settings,
    "api": code.api,
    "commands": code.commands,
    "error_classes": code.error_classes,
    "tree": code.source_tree,
    "headlines": tables.headlines,
    "about": results.about,
    "quality": tables.quality,
    "promises": tables.promises,
    "regimes": regimes_plots.section,
    "placement": tables.placement,
    "cache_cost": tables.cache_cost,
    "cache_runs": tables.cache_runs,
    "combined": tables.combined,
    "cards": tables.cards,
    "offload": tables.offload,
    "offload_summary": tables.offload_summary,
    "offload_models": tables.offload_models,
    "recipes": tables.recipes,
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
    """The page with its generated parts as they are now."""
    return MARKER.sub(lambda found: f"{found[1]}\n\n{MAKERS[found[2]](found[3]).strip()}\n\n{END}\n", text)


def generated_pages() -> list[Path]:
    """The pages that have generated parts."""
    return [file for file in sorted(DOCS.rglob("*.md")) if MARKER.search(file.read_text(encoding="utf-8"))]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Results are copied into the site; other files of the repository are named by their path."""
    up = "../" * page.file.src_uri.count("/")
    whole = markdown.replace("<!-- include: CONTRIBUTING.md -->", code.contributing())
    text = RESULT_LINK.sub(rf"]({up}results/\1)", whole)
    return REPOSITORY_LINK.sub(r"\1 (`\2`)", text)


def on_files(files: Any, config: Any) -> Any:
    """Add the results, which pages link to."""
    from mkdocs.structure.files import File

    for file in sorted(results.RESULTS.glob("*.json")):
        files.append(File.generated(config, f"results/{file.name}", abs_src_path=str(file)))
    return files


def main() -> None:
    for file in generated_pages():
        text = file.read_text(encoding="utf-8")
        current = expand(text)
        if current != text:
            file.write_text(current, encoding="utf-8")
            print(file.relative_to(ROOT))


if __name__ == "__main__":
    main()
