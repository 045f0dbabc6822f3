"""Crossovers of decode: published and counted limits as data, either side right at the other's lengths."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import count_crossovers
import pytest
import torch
from built import require_built

import mla_suite
from mla_suite import archs
from mla_suite.archs import decode_table
from mla_suite.archs.cdna import decode as cdna_decode
from mla_suite.build import compilers, manifest
from mla_suite.core import dispatch, tuning
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

ARCH = archs.get("gfx950")
TABLE = tuning.SHIPPED / "decode" / "tuned" / "gfx950.csv"
CPU = torch.device("cpu")
FP8 = {"kv_format": "fp8", "dtype": torch.float8_e4m3fn}
KINDS = {("16bit", "16bit"): {}, ("16bit", "fp8"): {"kv_format": "fp8"}, ("fp8", "fp8"): FP8}
PUBLISHED = [(8, 4096), (16, 2048), (32, 1024), (64, 256), (256, 64)]
NATIVE = "decode_fp8_query-fp8_weight-bf16_rows-16"


@pytest.fixture(autouse=True)
def gfx950():
    require_built("gfx950", NATIVE)
    with mla_suite.emulate("gfx950"):
        yield


def choose(batch, context, device="cuda", heads=32, q_len=4, **options):
    """The choice for a problem of this size, of which only the metadata is made."""
    args, kwargs = decode_sample([64] * 2, heads=heads, q_len=q_len, **(FP8 | options)).make(CPU)
    problem = DECODE.problem(*args, **kwargs)._replace(batch=batch, context=context)
    return dispatch.choose("decode", DECODE.backends, problem, ARCH, device)


def test_the_table_is_sound():
    for arch in ("gfx942", "gfx950"):
        assert tuning.lint(decode_table.FORMAT, arch, TABLE.with_stem(arch)) == ()
    assert {row.values["policy"] for row in tuning.rows(decode_table.FORMAT, "gfx942")} == {"default"}
    kinds = {(row.values["policy"], row.provenance["kind"]) for row in tuning.rows(decode_table.FORMAT, "gfx950")}
    assert kinds == {("aiter-pr3003", "published"), ("default", "counted")}


def test_the_context_is_the_mean_of_the_indices_that_are_given():
    """Sequences of 8,100 and 60 keys are 4,080 each in the mean, 4,096 rounded up; their buffer's capacity is more."""
    args, kwargs = decode_sample([8100, 60], heads=32, q_len=4, page=1, ragged_pages=True, **FP8).make(CPU)
    total, buffer = 8160, torch.nn.functional.pad(args[5][:8160], (0, 60_000))
    with decode_table.policy("aiter-pr3003"):
        for given, backend, context in ((buffer[:total], "native", 4096), (buffer, "reference", 34304)):
            explained = mla_suite.explain("decode", *args[:5], given, *args[6:], **kwargs)
            assert explained.backend == backend
            assert f"context {context} keys per sequence, from kv_indices per sequence x page_size" in str(explained)


@pytest.mark.parametrize(("batch", "context"), PUBLISHED)
def test_both_sides_of_each_published_limit(batch, context):
    """The published smoke cases are among them, at a limit and at twice a limit."""
    with decode_table.policy("aiter-pr3003"):
        assert choose(batch, context).backend.name == "native"
        assert {choose(batch, beyond).backend.name for beyond in (context + 1, 2 * context)} == {"triton"}
        assert choose(batch + 1, context).backend.name == ("triton" if context != 64 or batch >= 256 else "native")
        assert choose(257, 1).backend.name == "triton"
        assert choose(batch, context + 1, heads=16).backend.name == "native", "the rule is about 32 x 4 query rows"
        assert choose(batch, context + 1, kv_format="bf16", dtype=torch.bfloat16).backend.name == "native"


def test_calls_are_counted_by_what_ran_them():
    args, kwargs = decode_sample([64] * 2, heads=32, q_len=4, **FP8).make(CPU)
    with decode_table.policy("aiter-pr3003"), dispatch.count_calls() as calls:
        for context in (128, 8192, 128, 4096):
            torch.ops.mla_suite.decode(*args, **kwargs | {"max_seqlen_kv": context})
        mla_suite.decode(*args, **kwargs | {"max_seqlen_kv": 128})
    native = "decode_fp8_weights_query-fp8_weight-fp8_rows-128"
    assert calls == {("decode", "native", native): 4, ("decode", "reference", "None"): 1}
    torch.ops.mla_suite.decode(*args, **kwargs)
    assert sum(calls.values()) == 5, "only calls within the block"


def test_a_policy_is_that_of_its_thread():
    """Two threads call alike, by turns and from one set of caches; each runs what its own policy says."""
    args, kwargs = decode_sample([64] * 2, heads=32, q_len=4, **FP8).make(CPU)
    kwargs["max_seqlen_kv"] = 8192
    turn = threading.Barrier(2, timeout=120)

    def call(policy):
        with mla_suite.emulate("gfx950"), policy, dispatch.count_calls() as calls:
            for _ in range(2):
                turn.wait()
                mla_suite.decode(*args, **kwargs)
            backend = mla_suite.explain("decode", *args, **kwargs).backend
            turn.wait()
        return {ran[1] for ran in calls}, backend

    with ThreadPoolExecutor(2) as pool:
        own = pool.submit(call, contextlib.nullcontext())
        published = pool.submit(call, decode_table.policy("aiter-pr3003"))
        assert own.result() == ({"native"}, "native")
        assert published.result() == ({"reference"}, "reference"), "Triton takes no CPU tensors"


def test_explain_names_the_row():
    args, kwargs = decode_sample([300] * 2, heads=32, q_len=4, **FP8).make(CPU)
    kwargs["max_seqlen_kv"] = 8192
    with decode_table.policy("aiter-pr3003"):
        text = str(mla_suite.explain("decode", *args, **kwargs))
        assert f"published row {TABLE}:3 of policy aiter-pr3003" in text
        assert "leaves it to the triton kernel" in text
        assert "context 8192 keys per sequence, from max_seqlen_kv" in text
    kwargs["max_seqlen_kv"] = 1024
    text = str(mla_suite.explain("decode", *args, **kwargs))
    assert "by counted row" in text
    assert "batch up to 2, context up to" in text


def test_counted_limits_pick_the_tile():
    for row in tuning.rows(decode_table.FORMAT, "gfx950"):
        if row.values["policy"] == "default":
            rows, batch, context = (int(row.values[name]) for name in ("rows", "batch", "context"))
            kind = {"kv_format": "bf16", "dtype": torch.bfloat16} | KINDS[row.values["query"], row.values["cache"]]
            choice = choose(batch, context, heads=rows, q_len=1, **kind)
            assert choice.backend.name == "native"
            tile = cdna_decode.tile_rows(rows, decode_table.TILES[row.values["use"]])
            assert choice.supported.config.rows == tile
            assert row.position in choice.supported.reason
            beyond = choose(batch, context + 1, heads=rows, q_len=1, **kind)
            if context == count_crossovers.CONTEXTS[-1]:
                assert beyond.supported.config.rows == cdna_decode.tile_rows(rows)
            else:
                assert beyond.supported.config.rows != tile


@pytest.mark.parametrize(
    ("heads", "q_len", "batch", "context", "tile"),
    [
        (128, 4, 1, 1024, 16),  # 512 query rows: four tiles of 128 rows would leave most compute units idle
        (128, 2, 4, 2048, 16),
        (64, 4, 256, 8192, 128),  # full of large tiles
        (16, 3, 1, 1024, 16),  # 48 rows
    ],
)
def test_several_query_tokens_of_many_heads_take_small_tiles(heads, q_len, batch, context, tile):
    assert choose(batch, context, heads=heads, q_len=q_len).supported.config.rows == tile
    planned = choose(batch, context, heads=heads, q_len=q_len, planned=True)
    assert planned.supported.config.rows == cdna_decode.tile_rows(heads * q_len)


def test_a_row_of_tiles_that_are_not_built_leaves_it_to_the_rule(monkeypatch, caplog):
    """The native kernel runs in the rule's tiles, and one warning names row and kernel."""
    ruled = choose(2, 1 << 29).supported.config
    tiled = choose(2, 1024).supported.config
    assert tiled != ruled
    built = cdna_decode.has_kernel
    monkeypatch.setattr(cdna_decode, "has_kernel", lambda arch, name: name != tiled.instance and built(arch, name))
    dispatch.clear_caches()
    try:
        for context in (1024, 1000):
            choice = choose(2, context)
            assert choice.backend.name == "native"
            assert choice.supported.config == ruled
    finally:
        monkeypatch.undo()
        dispatch.clear_caches()
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert f"names tiles of kernel {tiled.instance}, which is not built for gfx950" in warned[0]


@pytest.mark.parametrize("options", [{"planned": True}, {"num_splits": 2}, {"split_size": 64}])
def test_counted_limits_are_about_our_own_splits(options):
    assert choose(1, 64).supported.config.rows == 16
    assert choose(0 if "split_size" in options else 1, 64, **options).supported.config.rows == 128


# The lengths promised to dispatch do not hold, in either direction, as when a captured graph is replayed.
@pytest.mark.parametrize(
    ("kind", "heads", "q_len"),
    [({}, 24, 2), ({"kv_format": "fp8"}, 24, 2), (FP8, 32, 4)],
    ids=["bf16", "fp8 cache", "fp8"],
)
def test_each_side_is_right_at_the_lengths_of_the_other(kind, heads, q_len):
    args, kwargs = decode_sample([1100, 1, 64], heads=heads, q_len=q_len, **kind).make(CPU)
    exact = exact_decode(*args, **kwargs)
    sizes = set()
    for promised, batch in ((256, 1), (8192, 1), (1 << 17, 1)):
        problem = DECODE.problem(*args, **kwargs)._replace(batch=batch, context=promised)
        choice = dispatch.choose("decode", DECODE.backends, problem, ARCH, "cpu")
        assert choice.backend.name == "native"
        sizes.add(choice.supported.config.rows)
        out = torch.full((*args[0].shape[:-1], 512), torch.nan, dtype=torch.bfloat16)
        lse = torch.full(args[0].shape[:-1], torch.nan)
        choice.backend.run(
            choice.supported.config, (out, lse), DECODE.Args(*args, **{**kwargs, "max_seqlen_kv": promised})
        )
        coarse = 0.14 if getattr(choice.supported.config, "fp8_weights", False) else 2.0**-7
        assert bool(((out.double() - exact.out).abs() <= coarse * exact.magnitude + 2.0**-8 * exact.out.abs()).all())
        torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-4, atol=1e-4)
    assert max(sizes) == heads * q_len > min(sizes)


def test_a_policy_ends_with_its_block_and_has_a_known_name():
    with decode_table.policy("aiter-pr3003"):
        pass
    assert choose(8, 8192).backend.name == "native"
    with (
        pytest.raises(ValueError, match="no policy 'fastest'; there are default, aiter-pr3003"),
        decode_table.policy("fastest"),
    ):
        pass


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_counted_rows_are_what_the_emulator_counts(monkeypatch, arch):
    require_built(arch, NATIVE)
    entry = manifest.installed().find(arch, NATIVE)
    if entry.compiler != compilers.packaged().version:
        pytest.skip(f"the counts are those of {compilers.packaged().version}, the kernels are of {entry.compiler}")
    monkeypatch.setattr(count_crossovers, "BLOCK_MS", (128,))
    monkeypatch.setattr(count_crossovers, "KINDS", (("fp8", "fp8"),))
    monkeypatch.setattr(count_crossovers, "BATCHES", (2, 16))
    rows = [line.split(",")[:8] for line in count_crossovers.lines(arch, "0000000", "2026-01-01")]
    assert rows
    shipped = [line.split(",")[:8] for line in TABLE.with_stem(arch).read_text().splitlines()]
    assert all(row in shipped for row in rows)
