"""FlashMLA's dense calls with several KV heads, which its own tests have: each shares the query heads that follow each
other, against the definition of one head at a time."""

import pytest
import torch
from flash_mla_calls import check, paged, several_expected

import mla_suite
from mla_suite.integrations import flash_mla_kv_heads
from mla_suite.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_suite.launch import has_kernel

SCALE = 576**-0.5


def decoded(q, k_cache, block_table, cache_seqlens, metadata=None, **options):
    return flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, 512, *(metadata or get_mla_metadata()), **options
    )


@pytest.mark.parametrize("form", ["holder", "arguments", "copied"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "lengths", "q_len", "page", "causal"),
    [
        (3, 3, [130, 0, 20], 1, 64, False),
        (9, 3, [20], 4, 64, True),
        (64, 2, [140, 20], 2, 64, False),
        (64, 8, [70, 2, 0, 64], 4, 64, True),
        (126, 3, [65, 3], 1, 64, True),
        (128, 8, [129, 1], 1, 61, False),
        (8, 2, [5, 300], 2, 1, True),
    ],
)
def test_dense_decoding_loop(heads, kv_heads, lengths, q_len, page, causal, form):
    cache, block_table, cache_seqlens = paged(lengths, page, kv_heads=kv_heads)
    metadata = get_mla_metadata()
    if form != "holder":
        metadata = get_mla_metadata(cache_seqlens, q_len * heads // kv_heads, kv_heads)
    if form == "copied":
        metadata = tuple(tensor.clone() for tensor in metadata)
    for _ in range(3):  # the first, one that is recognised, and one after that
        q = torch.randn(len(lengths), q_len, heads, 576).bfloat16()
        out, lse = decoded(q, cache, block_table, cache_seqlens, metadata, causal=causal)
        assert out.shape == (len(lengths), q_len, heads, 512)
        assert lse.shape == (len(lengths), heads, q_len)
        check(out, lse, several_expected(q, cache, block_table, lengths, SCALE, causal))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_machine_code_takes_what_the_cache_becomes(arch):
    """Pages of one token are native: the emulator runs the kernel that dispatch names."""
    if not has_kernel(arch, "decode_dtype-bf16_rows-16_width-576_rotate-0"):
        pytest.skip(f"decode is not built for {arch}; run `python -m mla_suite build --arch {arch}`")
    lengths = [70, 0, 33]
    given = paged(lengths, 16, kv_heads=2)
    q = torch.randn(3, 2, 16, 576).bfloat16()
    queries, cache, table, lens = flash_mla_kv_heads.split("a call", q, *given)
    with mla_suite.emulate(arch):
        chosen = mla_suite.explain("decode", queries, cache.squeeze(2), lens, table, softmax_scale=SCALE)
        out, lse = decoded(q, *given, causal=True)
    assert chosen.backend == "native"
    expected_out, expected_lse = several_expected(q, given[0], given[1], lengths, SCALE, True)
    # The kernel rounds its probabilities to bf16, too: 2^-8 of what they weigh, beside half an ulp of the result.
    torch.testing.assert_close(out.float(), expected_out, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_the_cache_and_single_query_tokens_are_not_copied():
    cache, block_table, cache_seqlens = paged([40, 7], 16, kv_heads=4)
    q = torch.randn(2, 1, 8, 576).bfloat16()
    problem = flash_mla_kv_heads.split("a call", q, cache, block_table, cache_seqlens)
    assert problem.k_cache.data_ptr() == cache.data_ptr()
    assert problem.q.data_ptr() == q.data_ptr()
    out, lse = torch.empty(8, 1, 2, 512), torch.empty(8, 2, 1)
    joined = flash_mla_kv_heads.join(out, lse, 4)
    assert [tensor.data_ptr() for tensor in joined] == [out.data_ptr(), lse.data_ptr()]


def test_no_sequences():
    cache, nothing = torch.zeros(1, 64, 2, 576), torch.zeros(0, dtype=torch.int32)
    out, lse = decoded(torch.zeros(0, 1, 16, 576), cache, nothing.view(0, 1), nothing, causal=True)
    assert out.shape == (0, 1, 16, 512)
    assert lse.shape == (0, 16, 1)


def test_compiles_in_one_graph():
    torch._dynamo.reset()
    decode = torch.compile(
        lambda q, cache, table, lens: decoded(q, cache, table, lens, causal=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for lengths in ([70, 0, 130], [5, 64, 200, 9]):
        cache, table, lens = paged(lengths, 64, kv_heads=2)
        q = torch.randn(len(lengths), 2, 8, 576).bfloat16()
        out, lse = decode(q, cache, table, lens)
        check(out, lse, several_expected(q, cache, table, lengths, SCALE, True))


INDICES = torch.zeros(2, 1, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q=torch.zeros(2, 1, 5, 576).bfloat16()), "5 query heads with 2 KV heads; the first is a multiple"),
        (dict(k_cache=torch.zeros(3, 2, 64, 576).bfloat16().transpose(1, 2)), "it takes a contiguous cache"),
        (dict(k_cache=torch.zeros(3, 64, 2, 656, dtype=torch.uint8), is_fp8_kvcache=True), "go with 1 KV head"),
        (dict(block_table=None, indices=INDICES), "go with 1 KV head"),
        (dict(attn_sink=torch.zeros(4)), "go with 1 KV head"),
        (dict(block_table=None), "dense attention needs both"),
        (dict(block_table=torch.zeros(2, dtype=torch.int32)), r"it takes \[batch, columns\]"),
        (dict(is_fp8_kvcache=True), "the two must agree"),
        (dict(cache_seqlens=torch.tensor([900, 1], dtype=torch.int32)), r"cache_seqlens\[0\] is 900"),
    ],
)
def test_refusals(changes, message):
    cache, block_table, cache_seqlens = paged([70, 3], 64, kv_heads=2)
    given = dict(
        q=torch.randn(2, 1, 4, 576).bfloat16(), k_cache=cache, block_table=block_table, cache_seqlens=cache_seqlens
    )
    with pytest.raises(ValueError, match=message):
        decoded(**{**given, **changes})


@pytest.mark.parametrize("options", [dict(is_fp8_kvcache=True), dict(topk=64), dict(num_heads_k=0)])
def test_refused_metadata(options):
    with pytest.raises(ValueError, match="it takes 1 KV head, or several in dense calls"):
        get_mla_metadata(torch.ones(2, dtype=torch.int32), 16, **dict(dict(num_heads_k=2), **options))
