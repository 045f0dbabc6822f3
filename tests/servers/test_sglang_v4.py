"""SGLang's own cases of DeepSeek V4's attention through our kernels, against SGLang's torch reference: `tox -e sglang`.

Left out are the cases that need a GPU: those whose metadata is made by DeepGEMM or by SGLang's CUDA programs (ratios 4
and 128, decodes with ratios 1 and 2), and captures of graphs. Bounds are SGLang's: its reference reads the rows before
they are quantised.
"""

from functools import partial
from typing import get_type_hints

import pytest
import sglang_v4_cpu as v4
from sglang.kernels.ops.attention import flash_mla_interface
from sglang.srt import server_args
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import deepseek_v4

from mla_suite.integrations import sglang_v4


@pytest.fixture
def calls(monkeypatch):
    v4.pass_for_a_gpu(monkeypatch)
    with v4.counted(monkeypatch) as seen:
        yield seen


@pytest.mark.parametrize("case", v4.fixture.make_dsv4_cases("dsv4"), ids=lambda case: case.name)
def test_window(case, calls):
    v4.fixture.run_dsv4_attention_case(v4.Testcase, case, device="cpu")
    assert {heads for _, heads, *_ in calls} == {64}


@pytest.mark.parametrize("verify", [True, False], ids=["verification", "draft extend"])
def test_drafts_of_a_window(verify, calls):
    v4.verify_or_extend(verify)
    assert calls == [("flash_mla_with_kvcache", 8, 584)]


LOW = [(ratio, prefix, extend) for ratio in (1, 2) for prefix, extend in (((0,), (40,)), ((100,), (9,)))]


@pytest.mark.parametrize("sparse_prefill", [False, True], ids=["two pools", "gathered"])
@pytest.mark.parametrize(("ratio", "prefix", "extend"), LOW)
def test_window_and_compressed_entries(ratio, prefix, extend, sparse_prefill, calls):
    """V4.1's ratios with 8 heads, by the call over two pools of records and by the gather of prefill."""
    case = v4.case(ForwardMode.EXTEND, ratio, prefix, extend)
    v4.fixture.run_dsv4_compress_attention_case(v4.Testcase, case, sparse_prefill=sparse_prefill, device="cpu")
    assert calls[-1][:2] == ("flash_mla_sparse_fwd" if sparse_prefill else "flash_mla_with_kvcache", 8)


def test_the_option_names_our_kernels():
    (argument,) = get_type_hints(server_args.ServerArgs, include_extras=True)["dsv4_attn_backend"].__metadata__
    assert argument.choices.count("mla_suite") == 1


def test_our_functions_are_taken_once_asked_for(calls):
    v4.fixture.run_dsv4_attention_case(v4.Testcase, v4.case(ForwardMode.DECODE, 0, (40,)), device="cpu")
    assert calls == [("flash_mla_with_kvcache", 8, 584)]
    assert flash_mla_interface.flash_mla_with_kvcache is sglang_v4.flash_mla_with_kvcache
    assert isinstance(flash_mla_interface.flash_mla_sparse_fwd, partial)
    layer = type("Layer", (), {"n_local_heads": 12})
    assert deepseek_v4.MqaAttentionBase._kernel_num_heads(layer, 5) == 12, "no head is padded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(disaggregation_mode="prefill"), "--disaggregation-mode is prefill"),
        (dict(enable_hisparse=True), "--enable-hisparse is given"),
        (dict(enable_deterministic_inference=True), "--enable-deterministic-inference is given"),
        (dict(attn_cp_size=2), "--attn-cp-size is 2"),
        (dict(dcp_size=4), "--dcp-size is 4"),
        (dict(enable_prefill_cp=True), "--enable-prefill-cp is given"),
        (dict(layout="uniform_fp8"), "the pool has the layout 'uniform_fp8'"),
    ],
)
def test_what_is_refused(options, message, monkeypatch):
    v4.pass_for_a_gpu(monkeypatch)
    sglang_v4.check(v4.runner_for_checks())
    with pytest.raises(NotImplementedError, match=message):
        sglang_v4.check(v4.runner_for_checks(**options))


def test_another_device_is_refused():
    with pytest.raises(NotImplementedError, match="is given without CUDA"):
        sglang_v4.check(v4.runner_for_checks())
