"""`.out` writes lse where and as its caller wants it: any strides, +inf for rows that see no key, nothing beside."""

import ctypes
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_suite
from mla_suite.core import checks
from mla_suite.launch import has_kernel
from mla_suite.ops.combine.reference import LseLayout
from mla_suite.ops.decode.samples import decode_sample

OPERATORS = torch.ops.mla_suite
CPU = torch.device("cpu")


def by_heads(shape):
    """(memory full of 7, a view of it as lse [batch, q_len, heads] or [tokens, heads] whose heads lie far apart)."""
    if len(shape) == 2:
        room = torch.full((shape[1], shape[0]), 7.0)
        return room, room.t()
    room = torch.full((shape[0], shape[2], shape[1]), 7.0)
    return room, room.transpose(1, 2)


def apart(shape):
    """The same with gaps around everything, from an address that is a multiple of 4 bytes alone."""
    room = torch.full((shape[0] + 1, *(n + 2 for n in shape[1:]), 2), 7.0)
    return room, room[(slice(1, None), *[slice(1, -1)] * (len(shape) - 1), 1)]


def dense(lens, planned=False, **kwargs):
    return decode_sample(lens, heads=3, kv_format="fp32", dtype=torch.float32, planned=planned, **kwargs).make(CPU)


def sparse(q_len):
    index = torch.tensor([[[-1, -1, -1], [1, 5, -1]], [[2, 2, 90], [-1, 9, 3]]], dtype=torch.int32)[:, :q_len]
    pool = torch.randn(4, 8, 48)
    args = torch.randn(2, q_len, 3, 48), [pool], [index], [None], [None], torch.randn(3)
    return args, dict(kv_formats=["fp32"], softmax_scale=0.3, head_dim_v=32)


def combine():
    partial_lse = torch.randn(6, 5)
    partial_lse[:2, 3] = -math.inf
    return (torch.randn(6, 5, 32), partial_lse), dict(num_splits=2, out_dtype=torch.float32)


CALLS = {
    "decode": ("decode", lambda: dense([130, 0, 7])),
    "decode of several query tokens": ("decode", lambda: dense([130, 0, 2], q_len=3)),
    "decode with a plan": ("decode", lambda: dense([130, 0, 2], q_len=3, planned=True)),
    "decode of ragged queries": ("decode", lambda: dense([130, 0, 2], q_len=3, varlen=True, num_splits=2)),
    "sparse_decode": ("sparse_decode", lambda: sparse(1)),
    "sparse_decode of two query tokens": ("sparse_decode", lambda: sparse(2)),
    "combine": ("combine", combine),
}


@pytest.mark.parametrize("layout", [by_heads, apart])
@pytest.mark.parametrize("plus_inf", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_lse_of_any_strides(call, plus_inf, layout):
    name, make = CALLS[call]
    args, kwargs = make()
    out, lse = getattr(OPERATORS, name)(*args, **kwargs)
    assert bool((lse == -math.inf).any())
    room, view = layout(lse.shape)
    mine, before = torch.full_like(out, 7.0), room._version
    getattr(OPERATORS, name).out(*args, **kwargs, out=mine, lse=view, plus_inf_lse=plus_inf)
    assert torch.equal(mine, out)
    assert torch.equal(view, lse.masked_fill(lse == -math.inf, math.inf) if plus_inf else lse)
    assert room._version > before, "autograd does not know that lse was written"
    view.fill_(7.0)
    assert bool((room == 7.0).all()), "something was written beside lse"


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_kernels_that_store_lse_one_way_are_converted(arch):
    """AMD's kernels store [tokens, heads] and -inf; the results are the same bits all the same."""
    if not has_kernel(arch, "combine_dv-512_rows-4_vec-4_waves-4_slices-1"):
        pytest.skip(f"no kernels for {arch}; run `python -m mla_suite build`")
    args, kwargs = decode_sample([40, 0, 1], heads=8, q_len=2, num_splits=2).make(CPU)
    with mla_suite.emulate(arch):
        out, lse = OPERATORS.decode(*args, **kwargs)
        assert "native" in str(mla_suite.explain("decode", *args, **kwargs))
        for layout, plus_inf in ((by_heads, True), (apart, False), (torch.empty_like, True)):
            view = layout(lse) if layout is torch.empty_like else layout(lse.shape)[1]
            mine = torch.empty_like(out)
            OPERATORS.decode.out(*args, **kwargs, out=mine, lse=view, plus_inf_lse=plus_inf)
            assert torch.equal(mine, out)
            assert torch.equal(view, lse.masked_fill(lse == -math.inf, math.inf) if plus_inf else lse)


def unaligned(count):
    """`count` floats that begin one byte past an aligned address, as another library may hand over."""
    memory = (ctypes.c_byte * (4 * count + 1))()
    return torch.frombuffer(memory, dtype=torch.float32, count=count, offset=1)


ROOM = torch.zeros(64)
REFUSED = {
    "expanded": (torch.zeros(1, 2, 3).expand(3, 2, 3), "lse has strides .* rows that share memory cannot be written"),
    "overlapping": (ROOM.as_strided((3, 2, 3), (4, 3, 1)), "lse has strides .* rows that share memory"),
    "one address": (ROOM.as_strided((3, 2, 3), (5, 1, 2)), "lse has strides .* rows that share memory"),
    "unaligned": (unaligned(18).view(3, 2, 3), "lse begins at an address that is no multiple of its 4 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_lse_that_cannot_be_written_is_refused_before_anything_is(case):
    lse, words = REFUSED[case]
    args, kwargs = dense([130, 0, 7], q_len=2)
    out = torch.full((3, 2, 3, 512), 7.0)
    before = lse.clone()
    if case == "unaligned" and lse.data_ptr() % 4 == 0:
        pytest.skip("this torch copies such memory to an aligned address")
    with pytest.raises(ValueError, match=f"decode.out: {words}"):
        OPERATORS.decode.out(*args, **kwargs, out=out, lse=lse, plus_inf_lse=True)
    assert bool((out == 7.0).all())
    assert torch.equal(lse, before)


def test_an_lse_by_heads_that_shares_memory_with_out_is_refused():
    args, kwargs = dense([130, 0, 7], q_len=2)
    memory = torch.full((3 * 2 * 3 * 513,), 7.0)
    out, lse = memory[: 3 * 2 * 3 * 512].view(3, 2, 3, 512), memory[-20:-2].view(3, 3, 2).transpose(1, 2)
    with pytest.raises(ValueError, match="lse shares memory with out"):
        OPERATORS.decode.out(*args, **kwargs, out=out, lse=lse)
    assert bool((memory == 7.0).all())


@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=3),
    st.permutations([0, 1, 2]),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
)
def test_a_layout_is_where_torch_finds_every_element(shape, order, gaps):
    order = [axis for axis in order if axis < len(shape)]
    room = torch.arange(1000).as_strided([shape[axis] + gaps[axis] for axis in order], _dense(shape, order, gaps))
    places = room.permute([order.index(axis) for axis in range(len(shape))])[tuple(slice(0, n) for n in shape)]
    assert not checks.overlaps_itself(places)
    layout = LseLayout.of(places)
    flat = places.reshape(-1, shape[-1])
    for t in range(flat.shape[0]):
        for h in range(flat.shape[1]):
            assert flat[t, h] == t * layout.token + t // layout.tokens * layout.batch + h * layout.head


def _dense(shape, order, gaps):
    """Strides of a contiguous tensor of shape[axis] + gaps[axis] along the axes in this order."""
    strides = [1]
    for axis in reversed(order[1:]):
        strides.append(strides[-1] * (shape[axis] + gaps[axis]))
    return strides[::-1]
