"""SGLang's own fixture of DeepSeek V4's attention, on a CPU that passes for an sm_90 GPU with our kernels chosen.

SGLang's wheel has the fixture, with a reference in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import flash_mla_absent  # noqa: F401  # before SGLang
import pytest
import sglang_cpu  # noqa: F401  # before SGLang
import torch
from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
from sglang.srt.layers.attention import deepseek_v4_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import deepseek_v4
from sglang.srt.runtime_context import get_context
from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as fixture

from mla_suite.integrations import flash_mla, plugins, sglang_v4

plugins.sglang()


class Testcase:
    """What the fixture asks of unittest; it skips where SGLang's backend raises, which is a failure here."""

    assertEqual = staticmethod(lambda found, wanted: _hold(found == wanted, f"{found} is not {wanted}"))
    assertIsNone = staticmethod(lambda found, why: _hold(found is None, why))
    assertIsNotNone = staticmethod(lambda found, why: _hold(found is not None, why))
    skipTest = staticmethod(pytest.fail)


def _hold(true: bool, why: str) -> None:
    assert true, why


def packed(rows: torch.Tensor) -> Any:
    """bf16 rows [n, 512] as SGLang's packer in Triton makes them, which Triton's interpreter rounds wrongly."""
    tiles = rows[:, :448].float().unflatten(1, (7, 64))
    exponents = (tiles.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil()
    values = (tiles / exponents.exp2()[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return NopeFp8RopeBf16Pack(values.flatten(1), rows[:, 448:].contiguous(), (exponents + 127).to(torch.uint8))


def pass_for_a_gpu(monkeypatch: Any, **options: Any) -> None:
    """Have SGLang take this CPU for an sm_90 GPU, and its servers be started with our kernels and `options`."""
    monkeypatch.setattr(deepseek_v4_backend, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    monkeypatch.setattr(fixture, "quant_to_nope_fp8_rope_bf16_pack_triton", packed)
    context = type(get_context())
    override = context.override_server_args

    def chosen(self: Any, **given: Any) -> Any:
        return override(self, **{**given, "dsv4_attn_backend": "mla_suite", **options})

    monkeypatch.setattr(context, "override_server_args", chosen)


@contextlib.contextmanager
def counted(monkeypatch: Any) -> Iterator[list[tuple[Any, ...]]]:
    """The names of our functions that are called, with heads, and the bytes of a token of each pool of records."""
    seen = []
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        ours = getattr(flash_mla, name)

        def call(*args: Any, ours: Any = ours, name: str = name, **given: Any) -> Any:
            pools = [given.get(pool) for pool in ("k_cache", "extra_k_cache")]
            seen.append((name, given["q"].shape[-2], *(pool.shape[-1] for pool in pools if pool is not None)))
            return ours(*args, **given)

        monkeypatch.setattr(sglang_v4, name, call)
    sglang_v4._put_in_place.cache_clear()
    theirs = deepseek_v4.MqaAttentionBase._kernel_num_heads
    yield seen
    deepseek_v4.MqaAttentionBase._kernel_num_heads = theirs
    sglang_v4._put_in_place.cache_clear()


def verify_or_extend(verify: bool) -> None:
    """Four drafts of two sequences, verified as a chain, or the draft model's own extend."""
    mode = ForwardMode.TARGET_VERIFY if verify else ForwardMode.DRAFT_EXTEND_V2
    run = "run_dsv4_target_verify_attention_case" if verify else "run_dsv4_draft_extend_attention_case"
    getattr(fixture, run)(Testcase, case(mode, 0, (200, 40), (4, 4)), device="cpu")


def case(mode: Any, ratio: int, prefix: tuple[int, ...], extend: tuple[int, ...] = (), heads: int = 8) -> Any:
    return fixture.DSV4AttentionCase(
        name=f"ratio_{ratio}_{prefix}_{extend}",
        backend="dsv4",
        forward_mode=mode,
        num_heads=heads,
        page_size=fixture.DSV4_PAGE_SIZE,
        prefix_lens=prefix,
        extend_lens=extend,
        compress_ratio=ratio,
        attn_sink_value=0.5,
    )


def runner_for_checks(layout: str = "v4", ratios: tuple[int, ...] = (4, 128), **options: Any) -> SimpleNamespace:
    """A model runner as far as the check of a server's options reads it."""
    pool = SimpleNamespace(get_swa_key_layout=lambda: SimpleNamespace(value=layout), present_ratios=ratios)
    return SimpleNamespace(server_args=SimpleNamespace(**options), token_to_kv_pool=pool)
