"""A prepared call is used again only if nothing that an operator may look at differs; its outputs are torch's."""

import pytest
import torch
from observers import Marked

import mla_suite
from mla_suite.archs import decode_table
from mla_suite.core import allocation, dispatch, prepared, register, tuning
from mla_suite.core.op import Output
from mla_suite.core.prepared import KnownCalls, PreparedCall

PREPARED = PreparedCall(tuple, lambda *given: None, ())
A, B, C = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(8)
ROOM = torch.zeros(64)


@pytest.fixture
def known():
    with torch.no_grad():
        yield KnownCalls("op")


def test_an_equal_call_is_found(known):
    assert known.find((A, None, C), (1, "bf16")) is None
    known.keep((A, None, C), (1, "bf16"), PREPARED)
    assert known.find((B, None, C.clone()), (1, "bf16")) is PREPARED, "values and addresses may differ"
    assert KnownCalls("other").find((A, None, C), (1, "bf16")) is None
    dispatch.clear_caches()
    assert known.find((A, None, C), (1, "bf16")) is None


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
def test_another_call_is_not(known, tensors, options):
    known.keep((A, None, C), (1,), PREPARED)
    assert known.find((A, None, C), (1,)) is PREPARED
    assert known.find(tensors, options) is None


def test_lists_are_compared_with_their_places_and_lengths():
    known, given = KnownCalls("lists", lists=True), (C, [A, B], C.clone(), [None])
    known.keep(given, (1,), PREPARED)
    for same in ((C, [B, A], ROOM[:8], [None]), (C, (A, B), ROOM[:8], (None,)), (C, [A, B], ROOM[:8], (None,))):
        assert known.find(same, (1,)) is PREPARED
        assert known.key(same, (1,)) == known.key(given, (1,))
    for other in (
        (C, [A], [B, given[2]], [None]),
        (C, A, B, given[2]),
        (C, [A, B], given[2], [ROOM[:8]]),
        (C, [A, B], given[2]),
        (C, [A, B, given[2]], []),
    ):
        assert known.find(other, (1,)) is None
        assert known.key(other, (1,)) != known.key(given, (1,))
    known.keep((C, [A, B], [A.clone()]), (1,), PREPARED)
    assert known.find((C, [A], [B, A.clone()]), (1,)) is None, "the same tensors, divided elsewhere"


def test_a_cpu_that_stands_for_another_arch(known):
    with mla_suite.emulate("gfx942"):
        known.keep((A,), (), PREPARED)
        assert known.find((A,), ()) is PREPARED
        with mla_suite.emulate("gfx950"):
            assert known.find((A,), ()) is None
    assert known.find((A,), ()) is None


def test_a_tensor_whose_gradient_is_enabled_later(known):
    """torch's guards compare requires_grad in either mode: a call without gradients is like one that asks for them."""
    needs = torch.zeros(4, 6, requires_grad=True)
    known.keep((needs, C), (), PREPARED)
    assert known.find((needs, C), ()) is PREPARED
    with torch.enable_grad():
        assert known.find((needs, C), ()) is None


def test_an_unaligned_tensor_is_left_to_the_key(known):
    known.keep((ROOM[1:],), (), PREPARED)
    assert known.find((ROOM[1:],), ()) is None
    known.keep((ROOM[4:],), (), PREPARED)
    assert known.find((ROOM[:-4],), ()) is PREPARED
    assert known.find((ROOM[1:-3],), ()) is None


def test_a_tensor_in_two_places_is_left_to_the_key(known):
    known.keep((A, A), (), PREPARED)
    assert known.guards == ()


def test_calls_that_take_turns_are_each_recognised(known):
    """As many as there are guards; the one that was not asked for the longest time gives way."""
    calls = [
        (PreparedCall(tuple, PREPARED.launch, ()), torch.zeros(size)) for size in range(1, prepared.MAX_GUARDS + 2)
    ]
    *several, last = calls
    for call, tensor in several:
        known.keep((tensor,), (), call)
    for _ in range(3):
        for call, tensor in several:
            assert known.find((tensor,), ()) is call
    assert len(known.guards) == len(several)
    known.find((several[0][1],), ())
    known.keep((last[1],), (), last[0])
    found = [known.find((tensor,), ()) for _, tensor in calls]
    assert found == [several[0][0], None, *(call for call, _ in several[2:]), last[0]]


def test_a_written_tensor_lies_apart_from_the_others():
    known = KnownCalls("writes", mutated=(1,))
    known.keep((ROOM[:8], ROOM[32:40]), (), PREPARED)
    for _ in range(2):
        assert known.find((ROOM[8:16], ROOM[16:24]), ()) is PREPARED
        assert known.find((ROOM[8:16], ROOM[12:20]), ()) is None


def test_options_of_the_call_before_are_not_rounded_again():
    asked = []
    known = KnownCalls("rounds", rounded=lambda tensors, options: asked.append(options) or (options[0] // 8,))
    known.keep((A,), (16,), PREPARED)
    found = [known.find((A,), (n,)) for n in (17, 17, 18, 24, 18)]
    assert found == [PREPARED, PREPARED, PREPARED, None, PREPARED]
    assert asked == [(16,), (17,), (18,), (24,)]


def sized():
    return KnownCalls("sized", sized=(1,), rounded=lambda tensors, options: (*options, tensors[1].numel() // 8))


def test_a_size_that_counts_rounded():
    """Of one tensor alone: the same tensor in another place keeps its size."""
    known, ids = sized(), torch.zeros(64, dtype=torch.int32)
    known.keep((ids[:20], ids[:16]), (1,), PREPARED)
    assert known.find((ids[:20], ids[:23]), (1,)) is PREPARED
    for other in ((ids[:20], ids[:24]), (ids[:20], ids[:15]), (ids[:16], ids[:16]), (ids[:20], ids[:16].view(4, 4))):
        assert known.find(other, (1,)) is None
        assert known.key(other, (1,)) != known.key((ids[:20], ids[:16]), (1,))
    assert known.key((ids[:20], ids[:23]), (1,)) == known.key((ids[:20], ids[:16]), (1,))


def test_strides_of_a_tensor_whose_size_counts_rounded():
    """One entry may have any stride, with which more entries are another tensor."""
    known, ids = sized(), torch.zeros(64, dtype=torch.int32)
    known.keep((A, ids[::2][:1]), (1,), PREPARED)
    assert known.find((A, ids[::2][:1]), (1,)) is PREPARED
    assert known.find((A, ids[::2][:4]), (1,)) is None
    assert known.key((A, ids[::2][:1]), (1,)) != known.key((A, ids[::2][:4]), (1,))


def test_keys_are_dropped_by_last_use(monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_CACHED", 3)
    dispatch.clear_caches()
    known = KnownCalls("keys")
    keys = [known.key((torch.zeros(size),), ()) for size in range(5)]
    for key in keys[:3]:
        prepared.add_prepared(key, PREPARED)
    assert prepared.prepared_call(keys[0]) is PREPARED
    for key in keys[3:]:
        prepared.add_prepared(key, PREPARED)
    assert [key for key in keys if prepared.prepared_call(key) is not None] == [keys[0], *keys[3:]]
    dispatch.clear_caches()


def test_bounds_are_rounded_up_by_a_64th_at_most():
    for n in (*range(300), 4095, 4096, 4097, 2**31 - 1):
        rounded = prepared.rounded_up(n)
        assert n <= rounded <= n * 65 / 64
        assert prepared.rounded_up(rounded) == rounded
    assert len({prepared.rounded_up(n) for n in range(1, 32769)}) < 700


def test_limits_of_tuned_tables_are_no_matter_of_rounding():
    rows = [row for arch in ("gfx942", "gfx950", "sm_90") for row in tuning.rows(decode_table.FORMAT, arch)]
    limits = {int(row.values["context"]) for row in rows}
    assert limits
    assert [limit for limit in limits if prepared.rounded_up(limit) != limit] == []


def test_guards_that_a_changed_state_of_the_dispatcher_outdates_are_built_anew(known):
    with torch.inference_mode():
        made = torch.zeros(4, 6)
        known.keep((made,), (), PREPARED)
        assert known.find((made,), ()) is PREPARED
    assert known.find((A,), ()) is None, "no inference tensor"
    known.keep((A,), (), PREPARED)
    assert known.find((A,), ()) is PREPARED


def test_without_torchs_guards_the_key_decides(monkeypatch):
    monkeypatch.setattr(prepared, "_Guards", None)
    dispatch.clear_caches()
    partials = torch.randn(6, 4, 128), torch.randn(6, 4)
    right = torch.ops.mla_suite.combine(*partials, num_splits=3)
    for _ in range(3):
        assert all(map(torch.equal, mla_suite.combine(*partials, num_splits=3), right))
    assert register.get("combine").functional.known.guards == ()


def test_outputs_of_the_caller_are_checked_after_equal_calls_too():
    """Each time the metadata is that of the last call but for one output."""
    partials, merge = (torch.randn(6, 4, 128), torch.randn(6, 4)), torch.ops.mla_suite.combine.out
    right = mla_suite.combine(*partials, num_splits=3, out_dtype=torch.float32)
    lse = torch.empty(2, 4)
    for _ in range(3):
        outputs = torch.empty(2, 4, 128), lse
        merge(*partials, num_splits=3, out_dtype=torch.float32, out=outputs[0], lse=lse)
        assert all(map(torch.equal, outputs, right))
    assert register.get("combine").out.known.guards
    strided = torch.empty(2, 4, 256)[..., :128]
    merge(*partials, num_splits=3, out_dtype=torch.float32, out=strided, lse=lse)
    assert torch.equal(strided, right[0])
    sizes = torch.empty(2, 4, 127), torch.empty(8, 128)
    for wrong in (*sizes, torch.empty(2, 4, 128).bfloat16(), torch.empty(2, 128, 4).transpose(1, 2)):
        with pytest.raises(ValueError, match="combine.out: out"):
            merge(*partials, num_splits=3, out_dtype=torch.float32, out=wrong, lse=lse)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 4), (0,)])
def test_outputs_are_as_torch_makes_them(monkeypatch, shape):
    outputs = [Output(shape, dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32)]
    device = torch.device("cpu")
    for made in (allocation.allocator(outputs, device)(), allocation.empty(outputs, device)):
        for tensor, (_, dtype) in zip(made, outputs, strict=True):
            right = torch.empty(shape, dtype=dtype)
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (right.shape, right.stride(), right.dtype)
            assert tensor.is_contiguous()
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    assert [tensor.shape for tensor in allocation.allocator(outputs, device)()] == [shape] * 3
    assert allocation.allocator([], device)() == ()
