"""Arguments of other kinds than a schema's are refused in one sentence each."""

import functools

import numpy as np
import pytest
import torch

import mla_suite
from mla_suite.core import dispatch, register
from mla_suite.errors import CallError
from mla_suite.kv_formats import empty, get_kv_format, pack, unpack, validate
from mla_suite.ops.decode.samples import decode_sample

combine = functools.partial(mla_suite.combine, num_splits=3, out_dtype=torch.float32)
append = functools.partial(mla_suite.append_kv, kv_format="fp32")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"softmax_scale": 10**400},
            "decode: softmax_scale is an int of 1329 bits; it takes a number that a float holds",
        ),
        ({"causal": None}, "decode: causal is None; it takes a bool"),
        ({"softmax_scale": None}, "decode: softmax_scale is None; it takes a number that a float holds"),
        ({"max_seqlen_q": 1.0}, "decode: max_seqlen_q is 1.0; it takes an int of 64 bits"),
        ({"num_splits": np.float32(2.5)}, f"decode: num_splits is {np.float32(2.5)!r}; it takes an int of 64 bits"),
        ({"num_splits": np.array([2.5])}, "decode: num_splits is a ndarray; it takes an int of 64 bits"),
        ({"kv_format": ["bf16"]}, "decode: kv_format is a list of str; it takes a string"),
        (
            {"block_table": None, "kv_indptr": torch.zeros(4, dtype=torch.int32), "kv_indices": []},
            "decode: kv_indices is an empty list; it takes a tensor",
        ),
        ({"seq_lens": [3, 5]}, "decode: seq_lens is a list of int; it takes a tensor"),
    ],
)
def test_an_argument_of_another_kind_is_refused_in_a_sentence(wrong, sentence):
    args, kwargs = register.get("decode").samples()[0].make(torch.device("cpu"))
    given = dict(zip(register.get("decode").functional.arguments, args, strict=False), **kwargs)
    with pytest.raises(CallError) as refused:
        mla_suite.decode(**{**given, **wrong})
    assert str(refused.value) == sentence


OPTIONS = {
    "decode": "softmax_scale max_seqlen_q max_seqlen_kv causal num_splits split_size window_left",
    "plan": "max_seqlen_kv num_sm_parts num_splits split_size window_left",
}


@pytest.mark.parametrize(("op", "option"), [(op, option) for op, names in OPTIONS.items() for option in names.split()])
@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2)], ids=["tensor", "array"])
def test_several_values_for_one_are_refused_behind_a_call_like_it(op, option, value):
    args, kwargs = register.get(op).samples()[0].make(torch.device("cpu"))
    call = functools.partial(getattr(mla_suite, op), *args)
    kwargs = {**kwargs, "max_seqlen_kv": 16384}
    for _ in range(2):  # the second is recognised by the metadata of the first
        call(**kwargs)
    with pytest.raises(TypeError, match=f"{op}: {option} is a (Tensor|ndarray); it takes"):
        call(**{**kwargs, option: value})


@pytest.mark.parametrize(("known", "wrong"), [(0, -1), (2**31 - 1, 2**31)])
def test_a_bound_out_of_range_is_refused_behind_a_call_that_rounds_alike(known, wrong):
    args, kwargs = decode_sample([70, 3], heads=4, split_size=64).make(torch.device("cpu"))
    call = functools.partial(mla_suite.decode, *args, **kwargs)
    for _ in range(2):
        call(max_seqlen_kv=known)
    with pytest.raises(ValueError, match=f"decode: max_seqlen_kv is {wrong}; it takes the longest length"):
        call(max_seqlen_kv=wrong)


@pytest.mark.parametrize("known", [False, True], ids=["first", "behind calls that are known"])
def test_a_nested_tensor_is_refused(known):
    """torch's guards, which recognise calls, ask for its strides, and that ends the process."""
    dispatch.clear_caches()
    out, lse = torch.randn(6, 4, 128), torch.randn(6, 4)
    for _ in range(2 if known else 0):
        combine(out, lse)
    with pytest.raises(TypeError, match="^combine: partial_out is nested; it takes dense tensors: join its parts$"):
        combine(torch.nested.nested_tensor(list(out)), lse)


ROWS, OUT, LSE = torch.ones(1, 1, 576), torch.randn(6, 4, 128), torch.randn(6, 4)
NO_SLOTS = torch.zeros(0, dtype=torch.int32)


def convert(source, destination):
    formats = {"source_format": "fp32", "destination_format": "fp32"}
    return mla_suite.explain("convert_kv", source, destination, NO_SLOTS, NO_SLOTS, **formats)


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (lambda: combine(None, LSE), "combine: partial_out is None; it takes a tensor"),
        (
            lambda: combine(OUT.to_sparse(), LSE),
            "combine: partial_out is sparse_coo; it takes dense tensors: call .to_dense()",
        ),
        (
            lambda: combine(OUT, LSE.to_sparse()),
            "combine: partial_lse is sparse_coo; it takes dense tensors: call .to_dense()",
        ),
        (
            lambda: combine(OUT, LSE, num_splits=torch.tensor([1, 2])),
            "combine: num_splits is a Tensor; it takes an int of 64 bits",
        ),
        (
            lambda: combine(OUT, LSE, num_splits=torch.tensor(3.5)),
            "combine: num_splits is 3.5; it takes an int of 64 bits",
        ),
        (lambda: mla_suite.plan(None, num_heads=16), "plan: seq_lens is None; it takes a tensor"),
        (lambda: mla_suite.plan(LSE, num_heads="16"), "plan: num_heads is '16'; it takes an int"),
        (
            lambda: mla_suite.sparse_decode(OUT, [], [], kv_formats=None, softmax_scale=1.0),
            "sparse_decode: kv_caches and kv_formats are a list and a NoneType; each is a list, one entry per pool",
        ),
        (
            lambda: append(LSE, LSE[:, :0], OUT[:, :, :4].clone(), None),
            "append_kv: slot_mapping is None; it takes a tensor",
        ),
        (
            lambda: append(LSE, LSE, OUT[:, :, :8].clone(), torch.arange(6), None, [LSE], torch.arange(6)),
            "append_kv: cos_sin is a list of Tensor; it takes a tensor",
        ),
        (lambda: pack("bf16", [1.0]), "pack: rows is a list of float; it takes a tensor"),
        (lambda: pack("bf16", []), "pack: rows is an empty list; it takes a tensor"),
        (lambda: pack("bf16", ROWS.to_sparse()), "pack: rows is sparse_coo; it takes dense tensors: call .to_dense()"),
        (lambda: pack("bf16", ROWS.int()), "pack: rows is int32; it takes a float dtype"),
        (lambda: pack("fp8", ROWS, descale=2.0), "pack: descale is 2.0; it takes a tensor"),
        (lambda: unpack("bf16", [1.0]), "unpack: cache is a list of float; it takes a tensor"),
        (lambda: validate("bf16", None), "validate: cache is None; it takes a tensor"),
        (lambda: empty("bf16", 1.5, 64), "empty: num_pages is 1.5; it takes an int"),
        (lambda: empty("bf16", 10**30, 64), "empty: num_pages is an int of 100 bits; it takes an int of 64 bits"),
        (lambda: empty("bf16", 4, None), "empty: page_size is None; it takes an int"),
        (lambda: empty("bf16", 4, torch.tensor(2.5)), "empty: page_size is tensor(2.5000); it takes an int"),
        (
            lambda: mla_suite.batch_invariant_split_size(np.array(2.5)),
            "batch_invariant_split_size: num_heads is array(2.5); it takes an int",
        ),
        (
            lambda: mla_suite.batch_invariant_split_size("16"),
            "batch_invariant_split_size: num_heads is '16'; it takes an int",
        ),
        (lambda: mla_suite.explain("plan", None, num_heads=16), "plan: seq_lens is None; it takes a tensor"),
        (
            lambda: mla_suite.explain("combine", [1.0], ROWS),
            "combine: partial_out is a list of float; it takes a tensor",
        ),
        (lambda: convert(None, ROWS), "convert_kv: source is None; it takes a tensor"),
        (lambda: convert(ROWS, None), "convert_kv: destination is None; it takes a tensor"),
        (lambda: mla_suite.emulate(None).__enter__(), "emulate: arch is None; it takes a name: gfx942 or gfx950"),
    ],
)
def test_no_tensor_or_no_number_is_refused_in_a_sentence(refused, sentence):
    """By operators, and by functions beside them."""
    with pytest.raises(TypeError) as error:
        refused()
    assert str(error.value) == sentence


def test_a_negative_size_of_a_cache_is_refused():
    with pytest.raises(ValueError, match="empty: page_size is -1; it takes 0 or more"):
        empty("dsv4", 1, -1)


def test_no_name_is_refused_like_an_unknown_one():
    with pytest.raises(ValueError, match=r"kv_format \['bf16'\] is unknown; the kv_formats are bf16, fp16"):
        get_kv_format(["bf16"])
    with pytest.raises(ValueError, match=r"no operator \['decode'\]; registered are"):
        mla_suite.explain(["decode"])
