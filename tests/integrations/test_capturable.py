"""Every call of the two integrations could be captured in a CUDA graph: nothing crosses between host and device.

Run on tensors without data: reading one raises, and a copy from the host is seen by the dispatch mode. That a capture
and its replays then give the right numbers is for a GPU: tests/gpu/test_integrations_on_gpu.py.
"""

from functools import partial

import pytest
import torch
from aiter_steps import MADE
from interface_calls import CALLS, aiter_metadata, dense, metadata
from interface_calls import step as aiter_step
from observers import crossings, on_device
from torch.utils import _pytree as pytree

import mla_suite
from mla_suite.integrations import aiter, flash_mla, metadata_convert

BATCH, HEADS, NUM_SM_PARTS = 3, 16, 8


def without_data(given):
    return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, given)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "dense again"])  # its holder's plan has data
def test_nothing_crosses_between_host_and_device(name):
    """Metadata that these calls are given was copied: what is known of its contents is in the tensors alone."""
    function, make = CALLS[name]
    given = without_data(make())
    assert crossings(lambda: function(**given)) == []


def test_nothing_crosses_for_metadata_that_is_remembered():
    asked, given = without_data(metadata()), without_data(dense())

    def step_with_a_pair():
        made, num_splits = flash_mla.get_mla_metadata(**asked)
        flash_mla.flash_mla_with_kvcache(**given | dict(tile_scheduler_metadata=made, num_splits=num_splits))

    assert crossings(step_with_a_pair) == []
    for page_size, options in ((16, {}), (1, {"topk": 5})):
        made = without_data(aiter_metadata()) | dict(page_size=page_size, **options)
        assert crossings(lambda made=made: aiter.get_mla_metadata_v1(**made)) == []
        buffers = {name: made[name] for name in MADE[1:]} | {MADE[0]: made["work_metadata_ptrs"]}
        step = without_data(aiter_step(page_size=page_size)[0]) | buffers
        assert crossings(lambda given=step: aiter.mla_decode_fwd(**given)) == []


def test_nothing_crosses_where_a_plan_becomes_flash_mlas():
    lens = on_device(BATCH)
    plan = mla_suite.plan(lens, num_heads=HEADS, num_sm_parts=NUM_SM_PARTS, max_seqlen_kv=0)
    call = partial(metadata_convert.to_flash_mla, plan, lens, num_sm_parts=NUM_SM_PARTS)
    assert crossings(call) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.tensor([1, 2], device="meta"),
        lambda: torch.zeros(2).to("meta"),
        lambda: on_device(2).copy_(torch.zeros(2)),
        lambda: on_device(2).__setitem__(0, 5),
        lambda: on_device(2).__setitem__(on_device(1), 5),
    ],
)
def test_a_crossing_is_noticed(call):
    assert crossings(call)


def test_a_read_is_noticed():
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        on_device(1).item()
