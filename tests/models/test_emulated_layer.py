"""The GPU MODE layer with its operators as gfx942's machine code: the contest's numbers, every kernel really run.

GEMMs are torch's. Everything is at the task's sizes but the batch; the `full` run has all its prefills.
"""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from contest import HEADS, compare, drawn_weights, our_layer, problem

import mla_suite
from mla_suite import emulator
from mla_suite.cli.demo_emulated import Witness
from mla_suite.models import MLA, MLAConfig, PagedLatentCache, cos_sin_table

ARCH = "gfx942"


def emulated(weights, batch, prefill):
    """One step of `MLA` in the emulator, its plan included -> (reports, explanations), after comparing both outputs."""
    task = problem(weights, batch, prefill)
    layer = our_layer(weights)
    with mla_suite.emulate(ARCH) as arch, emulator.configured(collect=True) as reports, Witness() as witness:
        plan = mla_suite.plan(task.step.seq_lens, num_heads=HEADS, num_sm_parts=arch.compute_units, max_seqlen_kv=0)
        y = layer.decode(task.x, task.kv_cache, task.step, task.cos_sin, plan=plan)
    compare(y, task.kv_cache, task, prefill)
    return reports, witness.answers


def check_all_native(reports, answers):
    assert [answer.op for answer in answers] == ["plan", "append_kv", "decode"]
    assert [answer.backend for answer in answers] == ["native"] * 3
    launched = [report.kernel for report in reports]
    for kernel in ("plan_step_search", "plan_step_balanced", "append_kv", "decode_rotated", "combine"):
        assert sum(name.startswith(kernel) for name in launched) == 1, launched
    assert [finding for report in reports for finding in report.findings] == []


@pytest.fixture(scope="module")
def weights():
    return drawn_weights()


SIZES = [(batch, prefill) for prefill in (128, 512, 1024, 2048, 4096, 6144) for batch in (1, 2)]


@pytest.mark.full
@pytest.mark.parametrize(("batch", "prefill"), SIZES)
@torch.no_grad()
def test_contest_layer_on_gfx942(weights, batch, prefill):
    """Two sequences of 512 and a narrower layer are below in every run, and at full width in the demo."""
    check_all_native(*emulated(weights, batch, prefill))


@pytest.mark.parametrize(("latent", "rope"), [(256, 64), (256, 32), (128, 32), (512, 0)])
@torch.no_grad()
def test_layers_of_other_widths_run_native_kernels(latent, rope):
    torch.manual_seed(0)
    config = dataclasses.replace(MLAConfig.tiny(), kv_lora_rank=latent, qk_rope_head_dim=rope)
    layer = MLA(config, kv_format="bf16", dtype=torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    table, x = cos_sin_table(config, 64), torch.randn(3, 1, config.hidden_size).bfloat16()
    results = []
    for names in ((), ("append_kv", "decode")):
        cache = PagedLatentCache(1, 12, 16, head_dim=config.cached_dim)
        step = cache.append([cache.allocate() for _ in range(3)], [1] * 3)
        cache.layers[0].copy_(torch.randn(12, 16, config.cached_dim, generator=torch.Generator().manual_seed(1)))
        step = step._replace(seq_lens=step.seq_lens + 9)
        with mla_suite.emulate(ARCH) if names else nullcontext(), Witness() as witness:
            results.append((layer(x, cache.layers[0], step, table), cache.layers[0]))
        if names:
            assert [(answer.op, answer.backend) for answer in witness.answers] == [(name, "native") for name in names]
    (expected, written), (got, stored) = results
    assert torch.equal(written, stored)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


@torch.no_grad()
def test_decode_reads_every_key_once():
    """Work that the emulator counted, against the shape: 513 keys of 576 bf16 values and 128 rows, per sequence."""
    batch, prefill = 2, 512
    reports, answers = emulated(drawn_weights(dim=256), batch, prefill)
    check_all_native(reports, answers)
    decode = next(report for report in reports if report.kernel.startswith("decode"))
    keys, row_bytes = batch * (prefill + 1), 1152
    # Items are split at any key and read in tiles of 16, so tiles at a split are filled up with other keys or none.
    assert keys * row_bytes <= decode.loaded["kv_cache"] < 1.25 * keys * row_bytes
    least = keys * 2 * HEADS * (576 + 512) / 2048  # FLOP over a compute unit's 2048 per clock
    assert least <= decode.bound(mla_suite.archs.get(ARCH)).matrix < 1.25 * least
