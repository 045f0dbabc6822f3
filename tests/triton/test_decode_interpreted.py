"""decode in Triton gives the reference's numbers, run by Triton's interpreter on the CPU.

The interpreter's bf16 dot is wrong (Triton 3.6), so inputs are fp16 and fp32, or bf16 that are multiplied as fp32.
"""

from typing import Any

import pytest
import torch
from backend import CPU, check_layouts, run
from backend_calls import assert_refused
from decode_grid import sequences
from hostile_inputs import hostile

import mla_suite
from mla_suite import testing
from mla_suite.core import register
from mla_suite.core.op import Sample
from mla_suite.ops.decode import triton as decode
from mla_suite.ops.decode.samples import decode_sample

FP32: dict[str, Any] = dict(kv_format="fp32", dtype=torch.float32)
DECODE = [
    decode_sample([130, 0, 7], planned=True, **FP32),
    decode_sample([70, 200, 33, 5], heads=8, q_len=3, page=16, sink=True, varlen=True, ragged_pages=True, **FP32),
    decode_sample([300, 129], heads=24, q_len=2, num_splits=3, **FP32),
    decode_sample([96, 40], q_len=2, page=1, causal=False, split_size=64, **FP32),
    decode_sample([96, 40], q_len=2, page=2, rotate=True, **FP32),
    decode_sample([400, 64], page=61, heads=12, rope=0, **FP32),
    decode_sample([400, 100], page=16, planned=True, sink=True, q_len=2, varlen=True, num_splits=3, **FP32),
    decode_sample([200, 0, 90], heads=2, latent=64, page=16, q_len=2, window_left=80, num_splits=2, **FP32),
    decode_sample([200, 150, 3], heads=2, latent=64, q_len=3, varlen=True, window_left=70, planned=True, **FP32),
    decode_sample([130, 65], heads=2, latent=64, page=1, window_left=0, causal=False, split_size=64, **FP32),
    decode_sample([3, 200], heads=2, latent=64, q_len=6, window_left=2**31 - 1, **FP32),
    decode_sample([130, 2, 70], heads=2, latent=64, q_len=6, tree=True, num_splits=2, ragged_pages=True, **FP32),
    decode_sample([100, 70], heads=2, latent=64, q_len=9, tree=True, varlen=True, planned=True, **FP32),
    decode_sample([70], heads=1, latent=64, q_len=60, tree=True, **FP32),
    decode_sample([147, 18, 0, 400], heads=2, latent=64, q_len=4, page=16, ranks=(4, 1, 16), **FP32),
    decode_sample([11, 202, 94], heads=2, latent=64, q_len=3, varlen=True, ranks=(3, 0, 1), num_splits=2, **FP32),
    decode_sample([70, 40], heads=2, kv_format="fp8", dtype=torch.float32, num_splits=1),
    decode_sample([200, 40], heads=2, kv_format="fp8", dtype=torch.float32, num_splits=2, sink=True),
]


@pytest.mark.parametrize("sample", DECODE, ids=lambda s: s.name)
def test_decode(sample: Sample) -> None:
    args, kwargs = sample.make(CPU)
    expected = mla_suite.decode(*args, **kwargs)
    got = run(decode, "decode", hostile(args, kwargs.get("window_left", -1)), kwargs)
    torch.testing.assert_close(got, expected, atol=3e-6, rtol=1e-5)


def test_inputs_that_are_parts_of_larger_tensors() -> None:
    """Queries, blocks of a cache, rows of a table and words of a tree that lie apart, NaN and -1 between them."""

    def apart(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
        wider = [size + 2 * (dim in dims) for dim, size in enumerate(tensor.shape)]
        room = testing.poison(torch.empty(wider, dtype=tensor.dtype))
        view = room[tuple(slice(1, -1) if dim in dims else slice(None) for dim in range(tensor.dim()))]
        return view.copy_(tensor)

    args, kwargs = decode_sample([130, 40], heads=2, latent=64, page=16, q_len=3, tree=True, **FP32).make(CPU)
    expected = mla_suite.decode(*args, **kwargs)
    q, cache, lens, table, *rest, tree, q_rope = args
    given = (apart(q, 2, 3), apart(cache, 1), lens, apart(table, 1), *rest, apart(tree, 1), q_rope)
    torch.testing.assert_close(run(decode, "decode", given, kwargs), expected, atol=3e-6, rtol=1e-5)


def test_no_key_is_lost_where_a_length_outgrows_its_bound() -> None:
    """A GPU does not look at lengths: the last split, which the bound says is the only one, has all further keys."""
    args, kwargs = decode_sample([200, 30], heads=2, latent=64, split_size=64, **FP32).make(CPU)
    expected = mla_suite.decode(*args, **kwargs)
    torch.testing.assert_close(
        run(decode, "decode", args, kwargs | {"max_seqlen_kv": 64}), expected, atol=3e-6, rtol=1e-5
    )


@pytest.mark.parametrize("how", [{"num_splits": 1}, {"num_splits": 2}, {"planned": True}], ids=str)
@pytest.mark.parametrize(
    ("window_left", "spoiled", "whole"), [(-1, (38, 70), (0, 8)), (9, (38, 70), (0, 8)), (9, (21, 53), (32, 40))]
)
def test_a_row_tile_reads_no_key_that_none_of_its_rows_sees(
    how: Any, window_left: int, spoiled: tuple[int, int], whole: tuple[int, int]
) -> None:
    """40 query tokens of two heads behind 30 keys are five row tiles. A NaN that is read is in all rows of a tile."""
    args, kwargs = decode_sample(
        [30 + 40], heads=2, latent=64, q_len=40, page=1, window_left=window_left, **how, **FP32
    ).make(CPU)
    expected = mla_suite.decode(*args, **kwargs)
    args[1][args[3][0, slice(*spoiled)].long()] = torch.nan
    for mine, right in zip(run(decode, "decode", args, kwargs), expected, strict=True):
        torch.testing.assert_close(mine[:, slice(*whole)], right[:, slice(*whole)], atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("sink", [False, True])
def test_batch_invariant_bits(sink: bool) -> None:
    """Alone a sequence of one split needs no combine, which it passes through beside longer ones; another has two."""
    args, kwargs = decode_sample([50, 200, 700], heads=3, latent=64, split_size=128, sink=sink, **FP32).make(CPU)
    together = run(decode, "decode", args, kwargs)
    for b, bound in ((0, 128), (1, 256)):
        alone = run(decode, "decode", tuple(sequences(args, [b])), kwargs | {"max_seqlen_kv": bound})
        assert all(torch.equal(a[0], t[b]) for a, t in zip(alone, together, strict=True))


@pytest.mark.parametrize("how", [{"num_splits": 1}, {"num_splits": 2}, {"planned": True}, {"varlen": True}], ids=str)
def test_outputs_of_any_strides(how: dict[str, Any]) -> None:
    args, kwargs = decode_sample([70, 0, 2], heads=3, q_len=3, page=16, **how, **FP32).make(CPU)
    check_layouts(decode, "decode", args, kwargs)


@pytest.mark.parametrize("how", [{}, {"num_splits": 2}, {"planned": True}], ids=str)
def test_query_tokens_of_no_sequence_are_not_written(how: dict[str, Any]) -> None:
    args, kwargs = decode_sample([70, 33, 2], heads=3, q_len=3, page=16, varlen=True, **how, **FP32).make(CPU)
    padded = torch.nn.functional.pad(args[0], (0, 0, 0, 0, 0, 2), value=torch.nan)
    tokens = args[0].shape[0]
    for mine, right in zip(
        run(decode, "decode", (padded, *args[1:]), kwargs), run(decode, "decode", args, kwargs), strict=True
    ):
        assert torch.equal(mine[:tokens], right)
        assert bool(mine[tokens:].isnan().all()), "as `run` fills outputs"


@pytest.mark.parametrize(
    ("q_dtype", "kv_format"),
    [(torch.float16, "bf16"), (torch.float16, "fp32"), (torch.bfloat16, "fp16"), (torch.bfloat16, "fp32")],
    ids=str,
)
def test_rows_of_more_bits_or_range_than_the_queries(q_dtype: torch.dtype, kv_format: str) -> None:
    """Neither bits of keys are lost nor is a value that the queries' type does not have infinite."""
    args, kwargs = decode_sample([70, 3], heads=4, q_len=2, kv_format=kv_format, dtype=q_dtype).make(CPU)
    args[1].mul_(3.0)
    if kv_format != "fp16":
        args[1][..., -1], args[0][..., -1] = 7e4, 0.0
    exact = testing.exact_decode(*args, **kwargs)
    out, lse = run(decode, "decode", args, kwargs)
    for compared in testing.attention_within((out, lse), exact):
        assert bool(((compared.got.double() - compared.exact).abs() <= compared.allowed).all()), compared.name
    torch.testing.assert_close(lse.double(), exact.lse, atol=3e-6, rtol=1e-6)


def test_turned_keys_are_rounded_as_those_of_a_cache_are() -> None:
    """Queries of more bits than the rows see the keys that a cache of rotated ones has."""
    case = decode_sample([70, 3], heads=4, kv_format="fp16", dtype=torch.float32, rotate=True)
    args, kwargs = case.make(CPU)
    kwargs |= {"softmax_scale": 1.0}
    _, lse = run(decode, "decode", args, kwargs)
    torch.testing.assert_close(lse.double(), testing.exact_decode(*args, **kwargs).lse, atol=1e-4, rtol=0)


def test_a_q_descale_that_fp16_queries_cannot_be_multiplied_by() -> None:
    args, kwargs = decode_sample([40], heads=4, kv_format="fp16", dtype=torch.float16).make(CPU)
    expected = mla_suite.decode(*args, **kwargs)
    descaled = (*args[:7], torch.tensor([2.0**20]), *args[8:])
    got = run(decode, "decode", descaled, kwargs | {"softmax_scale": kwargs["softmax_scale"] / 2**20})
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_refusals_are_sentences() -> None:
    args, kwargs = decode_sample([30], kv_format="bf16").make(CPU)
    problem = register.get("decode").problem(*args, **kwargs)
    for change in (dict(kv_format="v32"), dict(head_dim_v=500), dict(q_dtype=torch.float8_e4m3fnuz)):
        assert_refused(decode.supports(problem._replace(**change), None), ";")
