"""SGLang's own fixture of DeepSeek V4's attention, on a CPU that passes for an sm_90 GPU with our kernels chosen.

SGLang's wheel has the fixture, with a reference in torch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flash_mla_absent  # noqa: F401  # before SGLang
import pytest
import sglang_cpu  # noqa: F401  # before SGLang
import torch
from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
from sglang.srt.layers.attention import deepseek_v4_backend
from sglang.srt.runtime_context import get_context
from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as fixture

from mla_suite.integrations import plugins

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
