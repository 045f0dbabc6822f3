"""The TMA maps of sm_90's decode, without a GPU: what the driver is asked for, and which tensors a map can describe."""

from __future__ import annotations

import ctypes

import pytest
import torch
from decode_launches import CPU, call_of, launched

from mla_suite.archs.sm_90 import tensor_maps
from mla_suite.build import params
from mla_suite.launch import DriverError, tensor_map
from mla_suite.launch.spec import Copy, Input, TensorMap, inputs
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.sparse_decode import SPARSE_DECODE
from mla_suite.ops.sparse_decode.samples import PoolShape
from mla_suite.ops.sparse_decode.samples import sample as sparse_sample


def test_the_maps_lie_on_64_bytes():
    struct = params.load("decode_tma")
    assert struct.size % 64 == 0, "the driver would copy more than the host packs"
    maps = ("kv", "kv_rest", "q", "q_rope")
    assert [item.name for item in struct.fields[:64]] == [f"{what}_map_{i}" for what in maps for i in range(16)]


class FakeDriver:
    """cuTensorMapEncodeTiled as cuda.h declares it, writing down what it is given."""

    def __init__(self, code=0):
        u32, u64, address = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p
        kind, self.given = ctypes.c_int, None

        def encode(to, dtype, rank, base, sizes, strides, box, steps, interleave, swizzle, promotion, fill):
            self.given = (
                (to % 64, dtype, base, list(sizes[:rank]), list(strides[: rank - 1])),
                (list(box[:rank]), list(steps[:rank]), interleave, swizzle, promotion, fill),
            )
            ctypes.memmove(to, bytes(range(128)), 128)
            return code

        declared = (kind, ctypes.c_uint32, address, u64, u64, u32, u32, kind, kind, kind, kind)
        self.cuTensorMapEncodeTiled = ctypes.CFUNCTYPE(kind, address, *declared)(encode)


@pytest.mark.parametrize(
    ("dtype", "number", "swizzle"), [(torch.bfloat16, 9, 3), (torch.float16, 6, 3), (torch.uint8, 0, 2)]
)
def test_the_map_that_is_asked_for(monkeypatch, dtype, number, swizzle):
    driver = FakeDriver()
    monkeypatch.setattr(tensor_map, "open_library", lambda: driver)
    tensor_map.swizzled.cache_clear()
    cache = torch.empty(9, 70, 576, dtype=dtype)[:, :64]  # room between the pages
    words = tensor_map.swizzled(cache.data_ptr(), *tensor_maps.kv_map(None, cache.shape, cache.stride(), dtype, 9)[1:])
    assert driver.given == (
        (0, number, cache.data_ptr(), [64, 64, 9, 9], [n * dtype.itemsize for n in (576, 64, 70 * 576)]),
        ([64, 32, 9, 1], [1, 1, 1, 1], 0, swizzle, 2, 0),
    )
    assert b"".join(word.to_bytes(8, "little") for word in words) == bytes(range(128))
    tensor_map.swizzled.cache_clear()


@pytest.mark.parametrize(
    ("shape", "strides", "pitch"),
    [
        ((3, 2, 16, 576), (2 * 16 * 576, 16 * 576, 576), 576),
        ((3, 1, 16, 576), (16 * 640, 8, 640), 640),
        ((1, 1, 1, 576), (8, 8, 8), 576),
        ((5, 1, 576), (1000, 8), 1000),
        ((3, 2, 16, 576), (2 * 16 * 640, 16 * 640, 576), None),
        ((3, 1, 16, 576), (0, 0, 576), None),
    ],
)
def test_rows_one_stride_apart(shape, strides, pitch):
    assert tensor_maps.pitch(shape, (*strides, 1)) == pitch


@pytest.mark.parametrize(
    ("q_len", "strides", "within"),
    [
        (1, (0, 2**36, 512, 1), True),
        (2, (0, 2**35 - 1, 0, 1), True),
        (2, (0, 2**35 - 512 * 3, 512, 1), False),
        (3, (2**34, 16, 1), False),
    ],
)
def test_results_that_lie_too_far_apart_are_copied(q_len, strides, within):
    assert tensor_maps.within_span(q_len, 4, strides) == within


@pytest.mark.parametrize(("q_len", "rows"), [(1, 16), (2, 32), (8, 64)])
def test_queries_in_boxes(monkeypatch, q_len, rows):
    """The map of the queries; rows of an odd stride are copied first."""
    sample = decode_sample((700, 90, 5), heads=16, q_len=q_len, num_splits=1)
    args, kwargs = sample.make(CPU)
    wide = torch.zeros(3, q_len, 18, 576, dtype=torch.bfloat16)[:, :, :16]
    for q, copied in ((args[0], False), (wide, True)):
        with monkeypatch.context() as patch:
            call = launched(patch, ((q, *args[1:]), kwargs))
        address, _, sizes, strides, box = call.maps[1]
        assert (sizes, strides, box) == ((32, 3 * q_len * 16, 1, 18), (1152, 1152, 64), (32, rows, 1, 9))
        assert address == call.buffers["q"].data_ptr()
        assert (address != q.data_ptr()) == copied
        assert torch.equal(call.buffers["q"], q)


READ, JOINED = (f"the two parts of the queries are {how}" for how in ("read where they lie", "joined by a copy"))


@pytest.mark.parametrize(
    ("heads", "q_len", "box"),
    [
        *((128, 1, (64, 1)), (128, 4, (64, 1)), (16, 1, (16, 1)), (16, 4, (16, 4)), (16, 8, (16, 4)), (20, 1, (24, 1))),
        *((96, 1, (64, 1)), (4, 3, (4, 4)), (96, 2, None), (20, 2, None), (12, 3, None)),
    ],
)
def test_queries_in_two_parts(heads, q_len, box):
    """Parts as absorption and a slice of wider rows leave them are read there, if a block's rows are a box of heads and
    tokens."""
    args, kwargs = decode_sample((700, 90, 5), heads=heads, q_len=q_len, num_splits=1, parts=True).make(CPU)
    call = call_of(args, kwargs)
    launch = call.launches[0]
    assert launch.numbers["in_parts"] == (box is not None)
    if box is None:
        assert call.copies == (Copy(Input(0), beside=Input(14)),)
        assert launch.maps["q_rope_map"] is None
        return
    assert not call.copies
    assert READ in call.notes
    latent, rope = launch.maps["q_map"], launch.maps["q_rope_map"]
    tokens = 3 * q_len
    sizes, strides = (32, heads, tokens, 16), (tokens * 1024, 1024, 64)
    assert latent == TensorMap(Input(0), torch.bfloat16, sizes, strides, (32, *box, 1))
    sizes, strides = (32, heads, tokens, 2), (384, heads * 384, 64)
    assert rope == TensorMap(Input(14), torch.bfloat16, sizes, strides, (32, *box, 1))


@pytest.mark.parametrize(("heads", "q_len"), [(128, 1), (16, 4)])
def test_a_latent_part_by_token(heads, q_len):
    """As vLLM 0.33 has it: without gaps, and a token's heads behind each other."""
    args, kwargs = decode_sample((700, 90, 5), heads=heads, q_len=q_len, num_splits=1, parts=True).make(CPU)
    call = call_of([args[0].contiguous(), *args[1:]], kwargs)
    sizes, strides = (32, heads, 3 * q_len, 16), (1024, heads * 1024, 64)
    assert call.launches[0].maps["q_map"] == TensorMap(
        Input(0), torch.bfloat16, sizes, strides, (32, min(heads, 64), q_len, 1)
    )
    assert not call.copies


@pytest.mark.parametrize(("heads", "box"), [(8, 8), (20, 24), (64, 64), (128, 64)])
def test_queries_in_two_parts_over_selected_keys(heads, box):
    args, kwargs = sparse_sample(2, 3, heads, [PoolShape("v32", 2, 64, 24)], parts=True).make(CPU)
    call = call_of(args, kwargs, SPARSE_DECODE)
    launch = call.launches[0]
    assert launch.numbers["in_parts"]
    assert not call.copies
    assert READ in call.notes
    sizes, strides = (32, heads, 6, 16), (6 * 1024, 1024, 64)
    assert launch.maps["q_map"] == TensorMap(Input(0), torch.bfloat16, sizes, strides, (32, box, 1, 1))
    sizes, strides = (32, heads, 6, 2), (384, heads * 384, 64)
    assert launch.maps["q_rope_map"] == TensorMap(Input(9), torch.bfloat16, sizes, strides, (32, box, 1, 1))
    call = call_of(args, kwargs | {"softmax_scale": -0.1}, SPARSE_DECODE)
    assert call.copies == (Copy(Input(0), True, beside=Input(9)),)
    assert not call.launches[0].numbers["in_parts"]
    assert JOINED in call.notes


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("op", "sample"),
    [
        (DECODE, decode_sample((70, 90), parts=True)),
        (SPARSE_DECODE, sparse_sample(2, 1, 16, [PoolShape("v32", 2, 64, 24)], parts=True)),
    ],
    ids=["dense", "sparse"],
)
def test_other_archs_join_the_parts(op, sample, arch):
    call = call_of(*sample.make(CPU), op, arch)
    assert [copy.beside for copy in call.copies] == [inputs(op.Args)["q_rope"]]
    assert JOINED in call.notes


@pytest.mark.parametrize(
    ("options", "laid_out", "scale"),
    [
        (dict(kv_format="fp8", heads=8), lambda part: part, 0.1),
        (dict(heads=16), lambda part: part, -0.1),
        (dict(heads=16), lambda part: within(part, (0, 0, 0, 4)), 0.1),
        (dict(heads=16), lambda part: part[:, :, :1].expand_as(part), 0.1),
    ],
    ids=["keys first", "a negative scale", "rows of an odd stride", "one head for all"],
)
def test_parts_that_the_kernel_does_not_take_are_joined(options, laid_out, scale):
    args, kwargs = decode_sample((700, 90), num_splits=1, parts=True, **options).make(CPU)
    call = call_of([laid_out(args[0]), *args[1:]], kwargs | {"softmax_scale": scale})
    assert call.copies == (Copy(Input(0), scale < 0, beside=Input(14)),)
    assert JOINED in call.notes


def within(q, more):
    """Queries of the same sizes in a tensor with `more` of each."""
    return torch.zeros([a + b for a, b in zip(q.shape, more, strict=True)], dtype=q.dtype)[
        tuple(slice(size) for size in q.shape)
    ]


@pytest.mark.parametrize(
    ("laid_out", "copied"),
    [
        (lambda q: q, False),
        (lambda q: within(q, (0, 0, 0, 8)), False),
        (lambda q: within(q, (0, 0, 2, 0)), True),
        (lambda q: within(q, (0, 0, 0, 4)), True),
        (lambda q: torch.zeros(q.numel() + 4, dtype=q.dtype)[4:].view(q.shape), True),
    ],
    ids=["as they are", "in longer rows", "between other heads", "in rows of an odd stride", "off alignment"],
)
@pytest.mark.parametrize(
    ("op", "sample"),
    [(DECODE, decode_sample((70, 90))), (SPARSE_DECODE, sparse_sample(2, 1, 16, [PoolShape("v32", 2, 64, 24)]))],
    ids=["dense", "sparse"],
)
def test_queries_that_the_copy_engine_does_not_reach_are_copied(op, sample, laid_out, copied):
    (q, *rest), kwargs = sample.make(CPU)
    call = call_of((laid_out(q), *rest), kwargs, op)
    assert [copy.of for copy in call.copies] == [Input(0)] * copied


def test_a_cache_of_one_page_or_none(monkeypatch):
    """A stride between pages means nothing then, and the map of nothing takes the queries' address."""
    boxes = [
        tensor_maps.kv_map(None, shape, strides, torch.bfloat16, 9)
        for shape, strides in (((1, 64, 576), (1, 576, 1)), ((0, 64, 576), (36864, 576, 1)))
    ]
    assert [given[2:] for given in boxes] == [((64, 64, 9, 1), (1152, 128, 64 * 1152), (64, 32, 9, 1))] * 2
    args, kwargs = decode_sample((0,), num_splits=1).make(CPU)
    for pages in (1, 0):
        cache = args[1][:pages]
        with monkeypatch.context() as patch:
            maps = launched(patch, ((args[0], cache, *args[2:]), kwargs)).maps
        assert [address for address, *_ in maps] == [(cache if pages else args[0]).data_ptr(), args[0].data_ptr()]


def test_a_map_the_driver_refuses():
    with pytest.raises(DriverError, match="cuTensorMapEncodeTiled: CUDA error 1 for sizes"):
        tensor_map._encode(FakeDriver(code=1), 16, torch.bfloat16, (576, 64, 1), (1152, 73728), (64, 32, 1))
    with pytest.raises(DriverError, match="must be of CUDA 12 or newer"):
        tensor_map._encode(object(), 16, torch.bfloat16, (576, 64, 1), (1152, 73728), (64, 32, 1))
