"""A call of another library's function that is refused is refused in that function's words.

Every argument of every function is spoilt in every way below. The error then is one sentence that begins with the name
of the function that was called, and no argument of an operator is in it but those that the function has, too.
"""

import inspect
import re

import pytest
import torch
from interface_calls import CALLS

from mla_suite.core import register

OPERATORS = {name for op in register.registry().values() for name in op.out.arguments}
PLAIN = {"out", "plan", "positions", "indices", "causal", "kv_format"}  # words of English or of the caller's, too
SHAPE = re.compile(r"\[[^]]*\]")
PROSE = re.compile(r"[A-Za-z_]\w*")
EXPECTED = (ValueError, TypeError, RuntimeError, NotImplementedError)


def spoilt(value):
    """Values that may stand for an argument by mistake."""
    if isinstance(value, torch.Tensor):
        yield from ([1, 2], "text")
        yield from (value.long(), value.double(), value.to("meta"), value.flatten(), value[None], value[:-1])
        yield torch.cat((value, value[:1]))
        yield value[..., :-1]
        yield torch.stack((value, value), -1)[..., 0]
        if value.dtype == torch.int32:
            yield from (value + 5000, value - 5000)
    elif isinstance(value, float):
        yield from ("text", None if value is None else [1.0], torch.inf)
    elif isinstance(value, int):
        yield from ("text", None, -3, 0, 1 << 20, 2.5)
    elif value is None:
        yield from (3, torch.ones(3))


def complaint(function, arguments):
    try:
        function(**arguments)
    except EXPECTED as error:
        return error
    return None


@pytest.mark.parametrize("case", CALLS)
def test_a_refusal_speaks_of_the_functions_own_arguments(case):
    function, make = CALLS[case]
    own = set(inspect.signature(function).parameters) if case != "aiter reduces" else set(make())
    foreign = OPERATORS - own - PLAIN
    assert complaint(function, make()) is None
    refused, wrong = 0, []
    for argument in make():
        for number, value in enumerate(spoilt(make()[argument])):
            arguments = make()
            arguments[argument] = value
            error = complaint(function, arguments)
            if error is None or "can't allocate memory" in str(error):
                continue
            refused += 1
            said = str(error)
            name, _, sentence = said.partition(": ")
            if name != function.__name__ or "\n" in said or foreign & set(PROSE.findall(SHAPE.sub("", sentence))):
                wrong.append(f"{argument} {number}: {type(error).__name__}: {said[:200]}")
    assert refused > 3
    assert not wrong, "\n".join(wrong)
