"""What our vLLM classes do on a GPU alone, on a CPU: vLLM's kernels run in Triton's interpreter or have a stand-in."""

from types import SimpleNamespace

import pytest
import torch
import triton_on_cpu  # noqa: F401  # before vLLM

from mla_suite.integrations import vllm as dense
from mla_suite.integrations import vllm_sparse as sparse

GPU = SimpleNamespace(is_cuda_alike=lambda: True)


@pytest.mark.parametrize(("ranks", "rank", "interleave"), [(1, 0, 1), (2, 1, 1), (3, 2, 4)])
@pytest.mark.parametrize("width", [48, 128, 2176])
def test_slots_of_vllms_kernel_are_those_of_the_lines_in_torch(ranks, rank, interleave, width, monkeypatch):
    """48 columns are whole tiles of 16 alone; some positions are past the table, and some rows select nothing."""
    page, table = 4, torch.randperm(60).int().view(3, 20)
    owners = torch.tensor([0, 0, 1, 2, 2], dtype=torch.int32)
    indices = torch.randint(-40, 120 * ranks, (5, width), dtype=torch.int32).clamp(min=-1)
    indices[3] = -1
    given = indices, owners, table, page, ranks, rank, interleave
    expected = sparse.selected_slots(*given)
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["BLOCK_N"])
        return kernel(*args, **kwargs)

    kernel = sparse.triton_convert_req_index_to_global_index
    monkeypatch.setattr(sparse, "triton_convert_req_index_to_global_index", counted)
    monkeypatch.setattr(sparse, "current_platform", GPU)
    assert torch.equal(sparse.selected_slots(*given), expected)
    assert calls == [min(width, 128) if width % 128 == 0 else 16]
    assert 0 < (expected >= 0).sum() < expected.numel()


def test_a_selection_of_no_whole_tiles_takes_the_lines_in_torch(monkeypatch):
    monkeypatch.setattr(sparse, "current_platform", GPU)
    monkeypatch.setattr(sparse, "triton_convert_req_index_to_global_index", None)
    indices, owners = torch.tensor([[5, -1, 2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([[7, 3]], dtype=torch.int32)
    assert sparse.selected_slots(indices, owners, table, 4).tolist() == [[13, -1, 30]]


@pytest.fixture(scope="module")
def vllms_join():
    """A stand-in, with its name and its arguments, for the operator of vLLM's libraries for GPUs."""
    library, calls = torch.library.Library("_C_cache_ops", "FRAGMENT"), []

    def join(latent, rope, made):
        calls.append(tuple(made.shape))
        made.copy_(torch.cat((latent, rope), dim=-1))

    library.define("concat_mla_q(Tensor ql_nope, Tensor q_pe, Tensor! q_out) -> ()")
    library.impl("concat_mla_q", join, "CPU")
    yield calls
    library._destroy()


JOINED = {
    "as vLLM's layers give them": (torch.bfloat16, 128, 64, [(3, 5, 576)]),
    "values of 32 bits": (torch.float32, 128, 64, []),
    "rows that do not begin at 32 bytes": (torch.bfloat16, 120, 64, []),
    "32 rope values": (torch.bfloat16, 128, 32, []),
}


@pytest.mark.parametrize("case", JOINED)
def test_the_parts_of_a_query_are_joined_by_vllms_kernel(case, vllms_join, monkeypatch):
    """The second part is a slice of wider rows; the kernel joins the parts that it was made for, on a GPU alone."""
    vllms_join.clear()
    dtype, before, rope, by_vllm = JOINED[case]
    parts = torch.randn(3, 5, 512).to(dtype), torch.randn(3, 5, before + rope).to(dtype)[..., before:]
    expected = torch.cat(parts, dim=-1)
    assert torch.equal(dense.joined(*parts), expected)
    assert not vllms_join
    monkeypatch.setattr(dense, "current_platform", GPU)
    assert torch.equal(dense.joined(*parts), expected)
    assert vllms_join == by_vllm


def test_queries_without_rope_values_are_taken_as_they_are():
    latent = torch.randn(3, 5, 512)
    assert dense.joined(latent, latent[..., :0]) is latent


def test_a_vllm_without_the_operator_joins_by_torch(monkeypatch):
    monkeypatch.setattr(dense, "current_platform", GPU)
    monkeypatch.setattr(dense, "JOIN", "an_operator_that_no_library_has")
    latent, rope = torch.randn(2, 4, 512).bfloat16(), torch.randn(2, 4, 64).bfloat16()
    assert torch.equal(dense.joined(latent, rope), torch.cat((latent, rope), dim=-1))
