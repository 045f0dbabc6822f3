"""Other projects' models and interfaces on top of ours; each module imports its project, this one none.

Here is what several of them share: cache formats by dtype, the precision of scores over fp8 caches, where fp8 queries
and absorbed prompts gain, queries whose parts come apart, one-sentence errors, and whether a call is captured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mla_suite import archs
from mla_suite.core import checks
from mla_suite.errors import CallError, call_error
from mla_suite.launch import current_arch

if TYPE_CHECKING:
    from mla_suite.archs.base import ArchKernels

# The KV format of a cache of plain rows, by the dtype in which another project hands it over.
WIDE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP8 = {torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8_fnuz"}
KV_FORMATS = {**WIDE, **FP8}


PRECISION = (
    "fp8" if checks.env_flag("MLA_SUITE_PRECISION", os.environ.get("MLA_SUITE_PRECISION", ""), "fp8") else "full"
)
"""decode's `precision` for other projects' calls, which have no argument for it."""


def _kernels(like: torch.Tensor) -> ArchKernels | None:
    arch = current_arch(like)
    return None if arch is None else archs.kernels(arch)


def fp8_query_rows(like: torch.Tensor, page_size: int, joined: bool = True) -> int | None:
    """Returns `ArchKernels.fp8_query_rows` of the device of `like`, with PRECISION; None without kernels."""
    kernels = _kernels(like)
    return None if kernels is None else kernels.fp8_query_rows(PRECISION, page_size, joined)


def absorbed_prompt(like: torch.Tensor, head_dim: int, fp8: bool) -> int:
    """Returns `ArchKernels.absorbed_prompt` of the device of `like`; 0 without kernels."""
    kernels = _kernels(like)
    return 0 if kernels is None else kernels.absorbed_prompt(head_dim, fp8)


def pairs_saved(new: Iterable[int], cached: Iterable[int], per_key: int) -> float:
    """Returns how many pairs a batch saves that is expanded, beyond those that its cached keys cost.

    A pair is what a query token costs for a key that it sees with absorbed weights. Keys of the new tokens are expanded
    in products as large as those that absorb queries and results, so they count for neither side.

    new, cached  tokens of each sequence
    per_key      as `absorbed_prompt` has it: the pairs that a cached key costs
    """
    return sum(q_len * (prefix + q_len / 2) - per_key * prefix for q_len, prefix in zip(new, cached, strict=True))


def takes_query_parts(like: torch.Tensor, num_heads: int, q_len: int) -> bool:
    """Returns whether decode over 16-bit rows, and sparse_decode over others, read the two parts of 16-bit queries
    where they lie.

    On the device of `like`, where each sequence has up to q_len query tokens. Else a server's own kernel joins them in
    less time than decode does.
    """
    kernels = _kernels(like)
    return kernels is not None and kernels.takes_query_parts(num_heads, q_len)


def widened_rows(like: torch.Tensor, num_heads: int) -> int:
    """Returns `ArchKernels.widened_rows` of the device of `like`; 0 without kernels."""
    kernels = _kernels(like)
    return 0 if kernels is None else kernels.widened_rows(num_heads)


def capturing(tensor: torch.Tensor) -> bool:
    """Returns whether calls over this tensor are being captured, so that they must serve every later length."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def needs(project: str, module: str, instead: str) -> Iterator[None]:
    """While the block runs, which imports another project: an ImportError says what `module` of ours needs of it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{module} needs {project} ({error}); install it, or call mla_suite.{instead}") from error


def refuse(name: str, given: str, possible: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise `error` with one sentence: the function's name, what was given, and what is accepted."""
    raise call_error(error, name, given, possible)


def restate(name: str, words: Mapping[str, str], error: Exception) -> NoReturn:
    """Raise the error of an operator in the words of the function that was called, and any other error as it is.

    words  as in `CallError.said_by`
    """
    said = checks.mismatch(name, error) if type(error) is RuntimeError else error
    if isinstance(said, CallError):
        raise said.said_by(name, words) from None
    raise error


def in_words(name: str, words: Mapping[str, str], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `call` returns, an operator or what calls one; its errors are raised as `restate` has them."""
    try:
        return call(*args, **kwargs)
    except (CallError, RuntimeError) as error:
        restate(name, words, error)


def check_kinds(
    name: str,
    needed: dict[str, Any],
    optional: dict[str, Any],
    sizes: dict[str, Any],
    flags: dict[str, Any] | None = None,
) -> None:
    """TypeError for an argument that is no dense tensor of one dimension or more, or, of `sizes`, no int, or, of
    `flags`, neither True nor False."""
    for argument, value in (needed | {key: value for key, value in optional.items() if value is not None}).items():
        if not isinstance(value, torch.Tensor):
            refuse(name, f"{argument} is a {type(value).__name__}", "it takes a tensor", TypeError)
        if value.layout is not torch.strided or value.dim() == 0:
            kind = "has no dimension" if value.dim() == 0 else f"is {str(value.layout).removeprefix('torch.')}"
            refuse(name, f"{argument} {kind}", "it takes a dense tensor of one dimension or more", TypeError)
    for argument, value in sizes.items():
        checks.whole(name, argument, value)
    for argument, value in (flags or {}).items():
        if not isinstance(value, int) or value not in (0, 1):
            given = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            refuse(name, f"{argument} is {given}", "it takes True or False", TypeError)


def absent(module: str, functions: Mapping[str, str]) -> Callable[[str], Callable[..., NoReturn]]:
    """The `__getattr__` of a module that stands in for another project's.

    functions  of that project that are not here, each with what to do instead: they can be imported, so that one import
               is enough to change, and refuse when called
    """

    def find(name: str) -> Callable[..., NoReturn]:
        if name not in functions:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def refusing(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"{name}: {functions[name]}")

        return refusing

    return find


class With:
    """An object of another project's with other values of some attributes."""

    def __init__(self, theirs: Any, **values: Any) -> None:
        self._theirs = theirs
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)


def joined_queries(
    latent: torch.Tensor, rope: torch.Tensor, kernel: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
) -> torch.Tensor:
    """Returns one tensor of a query's two parts [tokens, heads, 512] and [tokens, heads, 64 or 0].

    The second is a slice of wider rows. With torch.cat a layer of 128 sequences of 128 heads took an H200 some 40 us
    more than its attention explains, so servers have a kernel for bf16 queries of 512 + 64 values that copies 16 or 32
    bytes at a time; None where a release or a GPU has none.
    """
    if not rope.shape[-1]:
        return latent
    shaped = (latent.shape[-1], rope.shape[-1], latent.dtype) == (512, 64, torch.bfloat16)
    if kernel is None or not (shaped and _in_vectors(latent) and _in_vectors(rope)):
        return torch.cat((latent, rope), dim=-1)
    return kernel(latent, rope)


def _in_vectors(part: torch.Tensor) -> bool:
    """Whether rows of 16-bit values have no gaps and begin at multiples of 32 bytes, the most that a load takes."""
    return part.stride(-1) == 1 and not any(at % 16 for at in (part.storage_offset(), *part.stride()[:-1]))
