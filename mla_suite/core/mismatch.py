"""Torch's errors for arguments of another type, which take eight lines, in one sentence."""

from __future__ import annotations

import re
from typing import Any

from mla_suite.core.op import Op

_MISMATCH = re.compile(
    r"mla_suite::\w+\(\) Expected a value of type '(?P<kind>.*)' for argument '(?P<argument>\w+)' but"
)
_KINDS = {
    **{"Tensor": "a tensor", "int": "an int of 64 bits", "float": "a number", "bool": "a bool", "str": "a string"},
    **{"List[Tensor]": "a list of tensors", "List[Optional[Tensor]]": "a list of tensors or None"},
    **{"List[str]": "a list of strings", "Optional[Tensor]": "a tensor", "Optional[int]": "a torch.dtype"},
}


def refuse(op: Op, arguments: dict[str, Any], error: RuntimeError) -> None:
    """TypeError that names the argument, what was given and what is accepted, if torch's error is about a type."""
    found = _MISMATCH.match(str(error))
    if found is None:
        return
    given, accepted = _given(arguments[found["argument"]]), _KINDS.get(found["kind"], found["kind"])
    raise TypeError(f"{op.name}: {found['argument']} is {given}; it takes {accepted}") from None


def _given(value: Any) -> str:
    """The value as a sentence names it."""
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {' and '.join(sorted({type(item).__name__ for item in value}))}"
    return repr(value) if value is None or isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
