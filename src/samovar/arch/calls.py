"""What a pipeline's call takes, by its signature and those of the calls that it hands its arguments on to."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def call_parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """The named parameters of a pipeline class's call. One with `**kwargs`, as people write around a pipeline of
    diffusers, takes what the calls of its parent classes take, too."""
    found: dict[str, inspect.Parameter] = {}
    for each in cls.__mro__:
        if "__call__" not in each.__dict__:
            continue
        _, *parameters = inspect.signature(each.__dict__["__call__"]).parameters.values()
        found = {one.name: one for one in parameters if one.kind not in _VARIADIC} | found
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
            break
    return found
