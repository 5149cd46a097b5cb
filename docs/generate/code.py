"""What the code says about itself: settings, names, commands, errors and the source tree, read from the source."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import html
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.generate.results import markdown_table
from samovar.core.settings import Settings, table

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "samovar"
_FIRST = [
    "attach",
    "detach",
    "Attached",
    "Omni",
    "AsyncOmni",
    "GenerationResult",
    "HookRegistry",
    "ModelHook",
    "Handle",
]


_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):\n((?: {4}.*\n?|\n)+)", flags=re.MULTILINE)


def named(path: str) -> Any:
    """The object at a dotted path, such as `samovar.cache.TeaCacheConfig`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def settings(path: str) -> str:
    """The settings of a class: type, default and help."""
    rows = [
        [f"`{name}`<br>{_code(kind, 'type')}", _code(default) if default else "required", text]
        for name, kind, default, text in fields_of(named(path))
    ]
    return markdown_table(["setting and type", "default", "meaning"], rows)


def fields_of(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and help of each field."""
    if issubclass(cls, Settings):
        kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        for name, row in table(cls).items():
            yield name, kinds[name], repr(row.default), row.help.replace("|", "\\|")
        return
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind, default = ast.unparse(node.annotation), ast.unparse(node.value) if node.value else ""
            yield node.target.id, kind, default, _docstring(after)


def _docstring(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return " ".join(node.value.value.split()).replace("|", "\\|") if is_text else ""  # type: ignore[union-attr]


def _code(text: str, style: str = "value") -> str:
    """Code in a cell of a table, where a bar would end the cell."""
    return f'<code class="{style}">{html.escape(text).replace("|", "&#124;")}</code>'


def api(path: str) -> str:
    """All exported functions and classes of a module, what most readers want first."""
    module = importlib.import_module(path)
    names = [name for name in module.__all__ if callable(getattr(module, name))]
    names.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name.lower()))
    return "\n\n".join(_described(name, getattr(module, name)) for name in names)


def _described(name: str, thing: Any) -> str:
    """A function, or a class with its public methods: signature and docstring."""
    parts, members = [f"### {name}", _signature(name, thing), _paragraphs(thing)], []
    if inspect.isclass(thing):
        private = [vars(base) for base in thing.__mro__ if base.__name__.startswith("_")]
        for member, value in {name: each for held in (*private, vars(thing)) for name, each in held.items()}.items():
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            text = _paragraphs(value.fget if isinstance(value, property) else function)
            if member.startswith("_") or not text or not (isinstance(value, property) or inspect.isfunction(function)):
                continue
            shown = f"`.{member}`" if isinstance(value, property) else f"`.{member}{_arguments(function)}`"
            members.append(f"- {shown}: {' '.join(text.split())}")
    return "\n\n".join(part for part in [*parts, "\n".join(members)] if part)


def _signature(name: str, thing: Any) -> str:
    """How it is called, as a code block with an argument a line if it is long."""
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return ""
    try:
        arguments = _arguments(thing)
    except ValueError:  # A type alias or a protocol.
        return ""
    line = f"{name}{arguments}"
    if len(line) > 100:
        signature = inspect.signature(thing)
        inner = "".join(f"    {_plain(parameter)},\n" for parameter in signature.parameters.values())
        line = f"{name}(\n{inner}){_returned(signature)}"
    return f"```py\n{line}\n```"


def _arguments(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    return f"({', '.join(map(_plain, parameters))}){_returned(signature)}"


def _returned(signature: inspect.Signature) -> str:
    annotation = signature.return_annotation
    return "" if annotation is signature.empty or annotation in (None, "None") else f" -> {_annotation(annotation)}"


def _plain(parameter: inspect.Parameter) -> str:
    kind = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
    default = "" if parameter.default is parameter.empty else f"{' = ' if kind else '='}{_default(parameter.default)}"
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    return f"{stars}{parameter.name}{kind}{default}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    """A default as one would write it; what has an address in memory is left out."""
    shown = repr(value)
    return "..." if " at 0x" in shown or len(shown) > 60 else shown


def _paragraphs(thing: Any) -> str:
    """The docstring, unless a class has only what dataclasses write for themselves."""
    text = inspect.cleandoc(thing.__doc__ or "") if thing is not None else ""
    if text.startswith(f"{getattr(thing, '__name__', '')}("):
        return ""
    return _SECTION.sub(_listed, text)


def _listed(section: re.Match[str]) -> str:
    """The arguments of a docstring, or what it returns or raises, as a list."""
    entries = re.split(r"\n(?=\S)", textwrap.dedent(section[2]).strip("\n"))
    lines = []
    for entry in entries:
        name, colon, meaning = " ".join(entry.split()).partition(": ")
        lines.append(f"- `{name}`: {meaning}" if colon and " " not in name else f"- {name}{colon}{meaning}")
    heading = {"Args": "Arguments"}.get(section[1], section[1])
    return f"{heading}:\n\n" + "\n".join(lines) + "\n"


def commands(_: str) -> str:
    """The help of every command."""
    from samovar.cli.entry import make_parser

    parser = make_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = [f"```text\n{_help(parser)}\n```"]
    parts += [f"## samovar {name}\n\n```text\n{_help(command)}\n```" for name, command in subparsers.choices.items()]
    return "\n\n".join(parts)


def _help(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = _wide(parser.formatter_class)
    return parser.format_help().strip()


def _wide(formatter: Any) -> Any:
    """The formatter at one width, whatever the terminal."""
    return lambda prog: formatter(prog, width=100, max_help_position=32)


def error_classes(_: str) -> str:
    """Every error class: where it stands in the tree, its code, and its docstring."""
    from samovar.core import errors

    rows = []
    for cls in _descendants(errors.SamovarError):
        depth = len([base for base in cls.__mro__ if issubclass(base, errors.SamovarError)]) - 1
        builtin = [base.__name__ for base in cls.__bases__ if base.__module__ == "builtins"]
        code = f"[`{cls.code}`](#{cls.code})" if issubclass(cls, errors.EngineError) else ""
        name = f"{'&emsp;' * depth}`{cls.__name__}`" + (f" ({', '.join(builtin)})" if builtin else "")
        rows.append([name, code, (inspect.getdoc(cls) or "").splitlines()[0]])
    return markdown_table(["class (also a)", "code", "raised for"], rows)


def _descendants(cls: type) -> list[type]:
    for room in ("parallel", "server", "engine", "lab"):  # Some rooms have error classes of their own.
        importlib.import_module(f"samovar.{room}")
    found = [cls]
    for child in sorted(cls.__subclasses__(), key=lambda child: child.__name__):
        if not child.__module__.startswith("samovar.server"):  # No caller sees those, but clients by their codes.
            found += _descendants(child)
    return found


def codes() -> set[str]:
    """Every error code that a client or caller can see: those of the classes, and those that the server names."""
    from samovar.core import errors

    found = {cls.code for cls in _descendants(errors.EngineError)}
    for file in (SOURCE / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.keyword(arg="code", value=value):
                    found |= _texts(value)
                case ast.Assign(targets=[target], value=value) if "code" in ast.unparse(target).lower():
                    found |= _texts(value)
                case ast.Call(func=ast.Name(id="_bad"), args=[_, _, value]):
                    found |= _texts(value)
    return {code for code in found if re.fullmatch(r"[a-z]+(_[a-z]+)*", code)}


def _texts(node: ast.expr) -> set[str]:
    """The strings that an expression may be; of a mapping, its values."""
    nodes = node.values if isinstance(node, ast.Dict) else [node]
    inner = [child for one in nodes for child in ast.walk(one) if not isinstance(child, ast.Compare)]
    return {child.value for child in inner if isinstance(child, ast.Constant) and isinstance(child.value, str)}


def source_tree(_: str = "") -> str:
    """Every source file with its purpose, from its docstring."""
    lines = ["```text", "src/samovar/"]
    for entry in sorted(SOURCE.iterdir(), key=_by_layer):
        if entry.suffix == ".py" and entry.name not in ("__init__.py", "__main__.py"):
            lines.append(f"  {entry.name:<22} {_purpose(entry)}")
        elif (entry / "__init__.py").exists():
            lines.append(f"  {entry.name + '/':<22} {_purpose(entry / '__init__.py')}")
            files = (file for file in sorted(entry.glob("*.py")) if file.name != "__init__.py")
            lines += [f"    {file.name:<20} {_purpose(file)}" for file in files]
    return "\n".join([*lines, "```"])


def _by_layer(entry: Path) -> tuple[int, str]:
    """The order of `tests/test_architecture.py`: what imports nothing first."""
    text = (ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8")
    layers = ast.literal_eval(re.search(r"LAYERS = (\[.*?\])(?:  #|\n\n|\n\"\"\")", text, flags=re.DOTALL)[1])  # type: ignore[index]
    places = {room: number for number, rooms in enumerate(layers) for room in rooms}
    return places.get(entry.stem, -1), entry.name


def _purpose(file: Path) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[?.]) ", " ".join(text.split("\n\n")[0].split()))[0]


def contributing() -> str:
    """`CONTRIBUTING.md` without its title; its links lead out of the site, so they become paths."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n")[2]
    return text.replace("](docs/", "](../")


if __name__ == "__main__":
    print(source_tree())
