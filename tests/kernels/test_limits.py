"""What native kernels take, up to which limit, and what they launch where there is nothing to compute."""

from __future__ import annotations

import re

import pytest
import torch

from mla_suite import archs
from mla_suite.archs.plan import MAX_SEQUENCES
from mla_suite.core import allocation, register
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.launch import declared_kernels
from mla_suite.ops.append_kv.samples import sample as append_sample
from mla_suite.ops.combine.samples import sample as combine_sample
from mla_suite.ops.convert_kv.samples import sample as convert_sample
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.samples import sample as plan_sample
from mla_suite.ops.sparse_decode.samples import PoolShape
from mla_suite.ops.sparse_decode.samples import sample as sparse_sample

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = archs.names()
# No tuned row is about a batch-invariant call, so the kernels alone decide.
SAMPLES = {
    "append_kv": append_sample(4, "v41"),
    "append_kv v32_nope": append_sample(4, "v32_nope"),
    "combine": combine_sample(1, 16, 4),
    "convert_kv": convert_sample(4, "v32", "bf16"),
    "decode": decode_sample((300,), split_size=64),
    "plan": plan_sample([300, 70], num_heads=16, num_sm_parts=7, max_seqlen_kv=300),
    "sparse_decode": sparse_sample(1, 1, 16, [PoolShape("dsv4", 2, 64, 24)]),
}
# Arch, sample, facts of which kernels take the first and refuse the second, and why.
LIMITS = [
    ("gfx942", "decode", dict(q_dtype=BF16), dict(q_dtype=FP32), "it takes bfloat16, float16 or float8_e4m3fnuz"),
    ("gfx950", "decode", dict(q_dtype=BF16), dict(q_dtype=FP32), "it takes bfloat16, float16 or float8_e4m3fn"),
    ("gfx942", "decode", dict(kv_format="fp8_fnuz"), dict(kv_format="fp8"), "kv_format fp8 with torch.bfloat16"),
    ("gfx950", "decode", dict(kv_format="fp8"), dict(kv_format="fp8_fnuz"), "kv_format fp8_fnuz with torch.bfloat16"),
    ("gfx942", "decode", dict(head_dim=512), dict(head_dim=511), "rows of 511 values with head_dim_v 512"),
    (
        *("gfx942", "decode", dict(head_dim=320, head_dim_v=256)),
        *(dict(head_dim=320, head_dim_v=256, q_dtype=FP16, kv_format="fp16"), "fp16 rows of 320 values; it takes bf16"),
    ),
    (
        *("gfx950", "decode", dict(head_dim=576, kv_format="fp8")),
        *(dict(head_dim=512, kv_format="fp8"), "fp8 rows of 512 values; it takes 576"),
    ),
    ("gfx942", "decode", dict(rope=64), dict(rope=32), "rope_cos_sin of 32 values"),
    ("gfx942", "decode", dict(rope=64), dict(rope=64, q_dtype=FP16, kv_format="fp16"), "with fp16 rows of 576"),
    ("gfx942", "decode", dict(rope=64), dict(rope=64, head_dim=512), "with bf16 rows of 512"),
    ("gfx942", "decode", dict(alignment=16), dict(alignment=8), "kv_cache is aligned to 8 bytes"),
    ("gfx942", "decode", dict(heads=1), dict(heads=0), "0 query rows per sequence"),
    ("gfx942", "decode", dict(heads=128 * 65535), dict(heads=128 * 65535 + 1), "8388481 query rows per sequence"),
    ("sm_90", "decode", dict(heads=65535), dict(heads=65536), "rows x heads below 4294967296"),
    ("sm_90", "decode", dict(heads=1, q_len=2**25 - 1), dict(heads=1, q_len=2**25), "it takes 1 to 33554431"),
    *((name, "plan", dict(batch=1), dict(batch=0), "0 sequences; it takes 1 to") for name in NAMES),
    *((name, "plan", dict(batch=MAX_SEQUENCES), dict(batch=MAX_SEQUENCES + 1), "sequences; it") for name in NAMES),
    *((name, "combine", dict(rows=2**31 - 1), dict(rows=2**31), "it takes 2147483647 rows") for name in NAMES),
    *((name, "combine", dict(head_dim_v=256), dict(head_dim_v=64), "512 or 256 or 128") for name in NAMES),
    *((name, "sparse_decode", dict(heads=65535 * 128), dict(heads=65535 * 128 + 1), "heads; it") for name in NAMES),
    *((name, "sparse_decode", dict(heads=1), dict(heads=0), "0 heads; it takes 1 to 8388480") for name in NAMES),
    ("sm_90", "append_kv", dict(dtype=BF16), dict(dtype=FP16), "kv_c is torch.float16"),
    ("sm_90", "append_kv", dict(latent=448, rope=64), dict(latent=452, rope=60), "rows of 452 [+] 60 values"),
    ("sm_90", "append_kv", dict(latent=448, rope=64), dict(latent=440, rope=72), "rows of 440 [+] 72 values"),
    ("sm_90", "append_kv", dict(vectors=True), dict(vectors=False), "where loads of 16 bytes do not reach them"),
    ("sm_90", "append_kv", dict(alignment=16), dict(alignment=8), "where loads of 16 bytes do not reach them"),
]


def answer(arch, sample, **facts):
    op = register.get(sample.split()[0])
    args, kwargs = SAMPLES[sample].make(CPU)
    with declared_kernels():
        return op.backends[0].supports(op.problem(*args, **kwargs)._replace(**facts), archs.get(arch))


@pytest.mark.parametrize(("arch", "sample", "taken", "refused", "why"), LIMITS)
def test_a_kernel_takes_all_up_to_its_limit(arch, sample, taken, refused, why):
    found = answer(arch, sample, **refused)
    assert isinstance(found, Unsupported)
    assert re.search(why, found.reason)
    assert isinstance(answer(arch, sample, **taken), Supported)


EMPTY = {
    "no tokens to append": ("append_kv v32_nope", lambda c, pe, cache, slots, *_: (c[:0], pe[:0], cache, slots[:0])),
    "no page to append to": ("append_kv v32_nope", lambda c, pe, cache, slots, *_: (c, pe, cache[:0], slots)),
    "no sequences to combine": ("combine", lambda out, lse, *_: (out[:0], lse[:0])),
    "no rows to combine": ("combine", lambda out, lse, *_: (out[:, :0], lse[:, :0])),
    "no tokens to convert": ("convert_kv", lambda old, new, of, to, *_: (old, new, of[:0], to[:0])),
    "no page to convert": ("convert_kv", lambda old, new, of, to, *_: (old[:0], new, of, to)),
    "no sequences to decode": ("decode", lambda q, cache, lens, table, *_: (q[:0], cache, lens[:0], table[:0])),
    "query tokens of no sequence": (
        "decode",
        lambda q, cache, lens, table, *_: (q[0], cache, lens[:0], table[:0], None, None, 0 * lens[:1]),
    ),
    "no query tokens to decode": ("decode", lambda q, cache, lens, table, *_: (q[:, :0], cache, lens, table)),
    "no tokens to select for": ("sparse_decode", lambda q, cache, index, *_: (q[:0], cache, [index[0][:0]])),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", EMPTY)
def test_a_call_with_nothing_to_do_launches_nothing(what, name):
    sample, emptied = EMPTY[what]
    op = register.get(sample.split()[0])
    args, kwargs = SAMPLES[sample].make(CPU)
    given = op.Args(*emptied(*args), **kwargs)
    found = answer(name, sample)
    if isinstance(found, Supported):
        outputs = allocation.empty(op.check(given), CPU)
        assert found.config.spec(outputs, given).launches == ()
