"""The house rules as tests: who may import whom, no cycles, exported names, sizes."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "samovar"
FILES = sorted(SOURCE.rglob("*.py"))

LAYERS = [
    {"core"},
    {"media"},
    {"hooks", "arch", "builtin"},
    {"trace"},
    {"cache", "graphs", "offload", "parallel"},
    {"compose"},
    {"engine"},
    {"omni"},
    {"server", "lab"},
    {"cli", "serve_ray"},
]
"""A room may import from the layers below its own, and from itself; never from a neighbour."""

BUDGETS = {
    "arch": 14_782,
    "builtin": 100,
    "cache": 21_779,
    "cli": 7_981,
    "compose": 8_182,
    "core": 10_059,
    "engine": 33_727,
    "graphs": 5_456,
    "hooks": 10_480,
    "lab": 13_099,
    "media": 3_250,
    "offload": 43_700,
    "omni": 2_120,
    "parallel": 18_184,
    "serve_ray": 975,
    "server": 23_196,
    "trace": 17_534,
}
MAX_SOURCE, MAX_TESTS = 235_000, 363_200
"""Tokens of code by room and in all, without comments and docstrings: packing or splitting gains nothing."""
MAX_COMPLEXITY = (20, 7)
"""Complexity of one function, and of nine of ten functions of a room."""
MORE_COMPLEX: dict[str, tuple[int, int]] = {
    "arch": (15, 8),
    "cache": (20, 9),
    "compose": (13, 9),
    "engine": (17, 10),
    "graphs": (20, 9),
    "lab": (12, 7),
    "offload": (19, 8),
    "parallel": (18, 9),
    "trace": (20, 8),
}
"""Rooms that are still more complex than that. May only shrink."""


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path, *, lazy: bool) -> Iterator[str]:
    """The modules of Samovar that a file imports; with `lazy`, also inside functions and for types alone."""
    tree = tree_of(file)
    package = module_name(file).split(".") if file.name == "__init__.py" else module_name(file).split(".")[:-1]
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            for alias in node.names:
                deeper = f"{target}.{alias.name}"
                yield deeper if deeper in MODULES else target
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


MODULES = {module_name(file) for file in FILES}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def layer_of(room: str) -> int:
    return next(index for index, rooms in enumerate(LAYERS) if room in rooms)


def test_imports_go_downwards_only() -> None:
    upwards = []
    for file in FILES:
        room = room_of(module_name(file))
        for imported in imports_of(file, lazy=True) if room not in ("", "__main__") else ():  # These see everything.
            is_other = imported in MODULES and room_of(imported) not in (room, "")
            if is_other and layer_of(room_of(imported)) >= layer_of(room):
                upwards.append(f"{module_name(file)} imports {imported}")
    assert upwards == []


def test_large_libraries_are_imported_when_they_are_needed() -> None:
    """diffusers takes seconds, and libraries of quantisation that it imports print what they lack."""
    names = "diffusers|transformers|peft|accelerate|torchao|bitsandbytes|sdnq|av"
    large = re.compile(rf"^(?:from|import) ({names})\b", re.MULTILINE)
    assert [str(file) for file in FILES if large.search(file.read_text(encoding="utf-8"))] == []


def test_every_room_has_a_place() -> None:
    known = {room for rooms in LAYERS for room in rooms}
    assert {room_of(module) for module in MODULES} - {"", "__main__"} <= known


def test_no_import_cycles() -> None:
    graph = {module_name(f): {m for m in imports_of(f, lazy=False) if m in MODULES} - {module_name(f)} for f in FILES}
    for package in {module for module in MODULES if any(other.startswith(f"{module}.") for other in MODULES)}:
        for targets in graph.values():
            targets.discard(package)  # A package's __init__ re-exports its own files; that is no cycle.
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for imported in graph[module]:
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


UNIMPORTABLE = {"samovar.__main__", "samovar.serve_ray", "samovar.offload.decode_kernel"}
"""It runs the command line; it needs the extra `ray`; it needs Triton."""


def test_exported_names_exist() -> None:
    wrong = []
    for name in sorted(MODULES - UNIMPORTABLE):
        module = importlib.import_module(name)
        wrong += [f"{name}.{each}" for each in getattr(module, "__all__", ()) if not hasattr(module, each)]
    assert wrong == []


DECISIONS = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert, ast.match_case,
)  # fmt: skip
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def tokens_of(file: Path) -> int:
    """The tokens of a file that are code."""
    text = file.read_text(encoding="utf-8")
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, (node.end_lineno or 0) + 1))
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in NO_CODE and token.start[0] not in documentation for token in found)


def complexity(function: ast.AST) -> int:
    """One more than the number of decisions in a function, without those of functions inside it."""
    count, left = 1, list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        count += isinstance(node, DECISIONS)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            left.extend(ast.iter_child_nodes(node))
    return count


def test_rooms_keep_to_their_budgets() -> None:
    """What is new pays with what it replaces."""
    sizes: dict[str, int] = {}
    for file in FILES:
        room = room_of(module_name(file))
        sizes[room] = sizes.get(room, 0) + tokens_of(file)
    assert {room: size for room, size in sizes.items() if size > BUDGETS.get(room, 500)} == {}
    assert sum(sizes.values()) <= MAX_SOURCE
    assert sum(map(tokens_of, (ROOT / "tests").rglob("*.py"))) <= MAX_TESTS


def test_functions_decide_little() -> None:
    rooms: dict[str, list[tuple[int, str]]] = {}
    for place, function in [*nodes_of(ast.FunctionDef), *nodes_of(ast.AsyncFunctionDef)]:
        found = complexity(function), f"{place} {function.name}"
        rooms.setdefault(room_of(place.partition(":")[0]), []).append(found)
    limits = {room: MORE_COMPLEX.get(room, MAX_COMPLEXITY) for room in rooms}
    assert [found for room, of_room in rooms.items() for found in of_room if found[0] > limits[room][0]] == []
    p90 = {room: sorted(found)[int(0.9 * len(found))] for room, found in rooms.items() if len(found) > 20}
    assert {room: found for room, found in p90.items() if found[0] > limits[room][1]} == {}


def test_every_file_says_what_it_is() -> None:
    said = {module_name(file): (ast.get_docstring(tree_of(file)) or "?").splitlines()[0] for file in FILES}
    assert [name for name, line in said.items() if line.endswith("?")] == [], "a statement, not a question"


def nodes_of(kind: type[Node]) -> Iterator[tuple[str, Node]]:
    """All nodes of a kind in the source, each with its place for messages."""
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, kind):
                yield f"{module_name(file)}:{getattr(node, 'lineno', 0)}", node


def test_the_tests_that_commands_run_exist() -> None:
    missing = []
    for file in (ROOT / "Makefile", *(ROOT / ".ci").iterdir(), *(ROOT / "benchmarks").glob("*.py")):
        for path, name in re.findall(r"\b(tests/[a-z_/]+(?:\.py)?)(?:::(\w+))?", file.read_text(encoding="utf-8")):
            there = (ROOT / path).exists() and (not name or f"def {name}" in (ROOT / path).read_text(encoding="utf-8"))
            missing += [] if there else [f"{file.name} runs {path}::{name}"]
    assert missing == []


def test_excepts_name_what_they_expect() -> None:
    """`except Exception` nowhere, `except BaseException` only to clean up and re-raise."""
    wrong = []
    for place, node in nodes_of(ast.ExceptHandler):
        names = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {"Exception"}
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        wrong += [place] if "Exception" in names or ("BaseException" in names and not raises) else []
    assert wrong == []


PRIVATE_MARKS = {
    "_hf_hook", "_old_forward", "_diffusers_hook", "_attention_backend", "_is_cached", "_compiled_call_impl",
    "_orig_mod", "peft_config", "scaling", "_active_adapter", "_disable_adapters", "merged_adapters", "_sp_plan",
    "_cp_plan", "_repeated_blocks", "_layerwise_offload_blocks_attr",
    "_layerwise_offload_blocks_attrs", "_step_index", "_begin_index", "_num_timesteps",
}  # fmt: skip
"""Names that other libraries write on modules, pipelines and schedulers."""


def test_marks_of_other_libraries_are_read_in_one_file_or_peft_s_in_another() -> None:
    files = ("samovar.core.interop:", "samovar.core.adapters:")
    read = [(place, constant.value) for place, constant in nodes_of(ast.Constant)]
    read += [(place, attribute.attr) for place, attribute in nodes_of(ast.Attribute)]
    assert [item for item in read if item[1] in PRIVATE_MARKS and not item[0].startswith(files)] == []
