"""A prepared call is used again only if nothing that an operator may look at differs."""

import pytest
import torch

import mla_suite
from mla_suite.core import dispatch, eager
from mla_suite.core.eager import PreparedCall

PREPARED = PreparedCall(tuple, lambda *given: None, (), {})
A, B, C = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(8)
ROOM = torch.zeros(64)


class Marked(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def alone():
    dispatch.clear_caches()
    PREPARED.guards.clear()
    with torch.no_grad():
        yield
    dispatch.clear_caches()


def test_an_equal_call_is_found():
    assert eager.find("op", (A, None, C), (1, "bf16")) is None
    eager.keep("op", (A, None, C), (1, "bf16"), PREPARED)
    assert eager.find("op", (B, None, C.clone()), (1, "bf16")) is PREPARED, "values and addresses may differ"
    assert eager.find("other", (A, None, C), (1, "bf16")) is None
    dispatch.clear_caches()
    assert eager.find("op", (A, None, C), (1, "bf16")) is None


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        ((torch.zeros(4, 7), None, C), (1,)),
        ((torch.zeros(6, 4).t(), None, C), (1,)),
        ((A.double(), None, C), (1,)),
        ((torch.zeros(4, 6, device="meta"), None, C), (1,)),
        ((ROOM[1:25].view(4, 6), None, C), (1,)),
        ((torch.nn.Parameter(A), None, C), (1,)),
        ((A.as_subclass(Marked), None, C), (1,)),
        ((torch._neg_view(A), None, C), (1,)),
        ((torch._efficientzerotensor(4, 6), None, C), (1,)),
        ((A, C, None), (1,)),
        ((A, C, C), (1,)),
        ((A, None, None), (1,)),
        ((None, A, C), (1,)),
        (([A], None, C), (1,)),
        ((A, None), (1,)),
        ((A, None, C), (2,)),
        ((A, None, C), (True,)),
        ((A, None, C), (1.0,)),
        ((A, None, C), (1, 0)),
        ((A, None, C), ()),
    ],
)
def test_another_call_is_not(tensors, options):
    eager.keep("op", (A, None, C), (1,), PREPARED)
    assert eager.find("op", (A, None, C), (1,)) is PREPARED
    assert eager.find("op", tensors, options) is None


def test_lists_are_compared_with_their_places_and_lengths():
    given = [A, B], C, [None]
    eager.keep("op", given, (1,), PREPARED)
    assert eager.find("op", ([B, A], C, [None]), (1,)) is PREPARED
    for other in (
        ([A], [B, C], [None]),
        ((A, B), C, [None]),
        (A, B, C),
        ([A, B], C, [C]),
        ([A, B], C),
        ([A, B, C], []),
    ):
        assert eager.find("op", other, (1,)) is None


def test_a_cpu_that_stands_for_another_arch():
    with mla_suite.emulate("gfx942"):
        eager.keep("op", (A,), (), PREPARED)
        assert eager.find("op", (A,), ()) is PREPARED
        with mla_suite.emulate("gfx950"):
            assert eager.find("op", (A,), ()) is None
    assert eager.find("op", (A,), ()) is None


def test_an_unaligned_tensor_is_left_to_the_key():
    eager.keep("op", (ROOM[1:],), (), PREPARED)
    assert eager.find("op", (ROOM[1:],), ()) is None


def test_calls_that_take_turns_are_each_recognised():
    """Guards of a call are built once and come back with it."""
    other = PreparedCall(tuple, lambda *given: None, (), {})
    for _ in range(3):
        for known, tensor in ((PREPARED, A), (other, C)):
            assert eager.find("op", (tensor,), ()) is None
            eager.keep("op", (tensor,), (), known)
            assert eager.find("op", (tensor,), ()) is known
        guards = [known.guards["op"].same for known in (PREPARED, other)]
    assert [known.guards["op"].same for known in (PREPARED, other)] == guards


def test_guards_that_a_changed_state_of_the_dispatcher_outdates_are_built_anew():
    with torch.inference_mode():
        made = torch.zeros(4, 6)
        eager.keep("op", (made,), (), PREPARED)
        assert eager.find("op", (made,), ()) is PREPARED
    for _ in range(2):
        assert eager.find("op", (A,), ()) is None, "no inference tensor"
        eager.keep("op", (A,), (), PREPARED)
        if eager.find("op", (A,), ()) is PREPARED:
            return
    pytest.fail("never recognised")


def test_without_torchs_guards_the_key_decides(monkeypatch):
    monkeypatch.setattr(eager, "_Guards", None)
    partials = torch.randn(6, 4, 128), torch.randn(6, 4)
    right = torch.ops.mla_suite.combine(*partials, num_splits=3)
    for _ in range(3):
        assert all(map(torch.equal, mla_suite.combine(*partials, num_splits=3), right))
    assert not eager._last


def test_outputs_of_the_caller_are_checked_after_equal_calls_too():
    """Each time the metadata is that of the last call but for one output."""
    partials, merge = (torch.randn(6, 4, 128), torch.randn(6, 4)), torch.ops.mla_suite.combine.out
    right = mla_suite.combine(*partials, num_splits=3, out_dtype=torch.float32)
    lse = torch.empty(2, 4)
    for _ in range(3):
        outputs = torch.empty(2, 4, 128), lse
        merge(*partials, num_splits=3, out_dtype=torch.float32, out=outputs[0], lse=lse)
        assert all(map(torch.equal, outputs, right))
    assert "combine.out" in eager._last
    strided = torch.empty(2, 4, 256)[..., :128]
    merge(*partials, num_splits=3, out_dtype=torch.float32, out=strided, lse=lse)
    assert torch.equal(strided, right[0])
    for wrong in (torch.empty(2, 4, 127), torch.empty(2, 4, 128).bfloat16(), torch.empty(2, 128, 4).transpose(1, 2)):
        with pytest.raises(ValueError, match="combine.out: out"):
            merge(*partials, num_splits=3, out_dtype=torch.float32, out=wrong, lse=lse)
