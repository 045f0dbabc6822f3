"""Arguments of other kinds than a schema's are refused in one sentence each."""

import functools

import pytest
import torch

import mla_suite
from mla_suite.core import register

combine = functools.partial(mla_suite.combine, num_splits=3, out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"causal": None}, "decode: causal is None; it takes a value"),
        ({"softmax_scale": None}, "decode: softmax_scale is None; it takes a value"),
        ({"max_seqlen_q": 1.0}, "decode: max_seqlen_q is 1.0; it takes an int of 64 bits"),
        ({"kv_format": ["bf16"]}, "decode: kv_format is a list of str; it takes a string"),
        ({"seq_lens": [3, 5]}, "decode: seq_lens is a list of int; it takes a tensor"),
    ],
)
def test_an_argument_of_another_kind_is_refused_in_a_sentence(wrong, sentence):
    args, kwargs = register.get("decode").samples()[0].make(torch.device("cpu"))
    given = dict(zip(register.get("decode").arguments, args, strict=False), **kwargs)
    with pytest.raises(TypeError) as refused:
        mla_suite.decode(**{**given, **wrong})
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (lambda out, lse: combine(None, lse), "combine: partial_out is None; it takes a tensor"),
        (
            lambda out, lse: combine(out.to_sparse(), lse),
            "combine: partial_out is sparse_coo; it takes dense tensors: call .to_dense()",
        ),
        (
            lambda out, lse: combine(out, lse.to_sparse()),
            "combine: partial_lse is sparse_coo; it takes dense tensors: call .to_dense()",
        ),
        (
            lambda out, lse: combine(out, lse, num_splits=torch.tensor([1, 2])),
            "combine: num_splits is a Tensor; it takes an int of 64 bits",
        ),
        (
            lambda out, lse: combine(out, lse, num_splits=torch.tensor(3.5)),
            "combine: num_splits is a Tensor; it takes an int of 64 bits",
        ),
        (lambda out, lse: mla_suite.plan(None, num_heads=16), "plan: seq_lens is a NoneType; it takes a tensor"),
        (lambda out, lse: mla_suite.plan(lse, num_heads="16"), "plan: num_heads is '16'; it takes an int"),
        (
            lambda out, lse: mla_suite.sparse_decode(out, [], [], kv_formats=None, softmax_scale=1.0),
            "sparse_decode: kv_caches and kv_formats are a list and a NoneType; each is a list, one entry per pool",
        ),
    ],
)
def test_no_tensor_or_no_number_is_refused_in_a_sentence(refused, sentence):
    with pytest.raises(TypeError) as error:
        refused(torch.randn(6, 4, 128), torch.randn(6, 4))
    assert str(error.value) == sentence
