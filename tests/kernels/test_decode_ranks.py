"""decode over a rank's keys: machine code in the emulator and the reference, each rank and the merge against fp64."""

from __future__ import annotations

import pytest
import torch
from decode_grid import assert_within_bound, decode
from hostile_inputs import in_turn
from rank_problems import SHAPES, merged, rank_calls, whole_call

import mla_suite
from mla_suite.testing import exact_decode

CPU = torch.device("cpu")
# e4m3 queries in large tiles round P to fp8 on one arch, whose bound is another test's.
EMULATED = [name for name in SHAPES if name not in ("e4m3", "one token")]


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_of_the_reference_merge_to_the_whole(name):
    results = [mla_suite.decode(*args, **kwargs) for args, kwargs in rank_calls(name, CPU)]
    args, kwargs = whole_call(name)
    assert_within_bound(*merged(results), exact_decode(*args, **kwargs), 2.0**-7)


@pytest.mark.parametrize(("arch", "name"), in_turn(("gfx942", "gfx950"), EMULATED))
def test_kernels_see_what_a_rank_may_see(name, arch):
    with mla_suite.emulate(arch):
        results = [decode(arch, args, kwargs) for args, kwargs in rank_calls(name, CPU)]
    for (args, kwargs), found in zip(rank_calls(name, CPU), results, strict=True):
        assert_within_bound(*found, exact_decode(*args, **kwargs))


CALL = rank_calls("four tokens", CPU)[1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cp_world_size": 0}, "cp_world_size is 0; it takes the number of ranks, 1 or more"),
        ({"cp_rank": 2}, "cp_rank is 2; it takes 0 to 1, below cp_world_size"),
        ({"cp_interleave": 0}, "cp_interleave is 0; it takes 1 or more keys, with all 2 ranks at most 1073741824"),
        ({"cp_interleave": 2**30}, "cp_interleave is 1073741824; it takes 1 or more keys"),
        ({"cp_tot_seq_lens": None}, "cp_tot_seq_lens is missing; 4 causal query tokens need the keys of each sequence"),
        ({"cp_tot_seq_lens": torch.zeros(3, dtype=torch.int32)}, r"cp_tot_seq_lens has shape \(3,\)"),
        ({"cp_tot_seq_lens": CALL[0][12] + 2}, r"seq_lens\[0\] is 350; rank 1 of 2 has 351 of 702 keys"),
        ({"attn_sink": torch.zeros(32)}, "attn_sink is given with cp_world_size 2; every rank would add it"),
        ({"rope_cos_sin": torch.zeros(2000, 64)}, "rope_cos_sin is given with cp_world_size 2; local positions"),
    ],
)
def test_a_share_that_cannot_be_is_refused(changes, sentence):
    args, kwargs = CALL
    names = ("attn_sink", "rope_cos_sin", "plan", "cp_tot_seq_lens")
    tensors = args[:9] + [changes.get(name, given) for name, given in zip(names, args[9:], strict=True)]
    options = kwargs | {name: value for name, value in changes.items() if name not in names}
    with pytest.raises(ValueError, match=sentence):
        mla_suite.decode(*tensors, **options)


def test_one_token_needs_no_total():
    (args, kwargs), _ = rank_calls("one token", CPU)
    without = mla_suite.decode(*args[:12], **kwargs)
    for found, wanted in zip(without, mla_suite.decode(*args, **kwargs), strict=True):
        assert torch.equal(found, wanted)
