"""Values are checked on the CPU always, on other devices in debug mode alone."""

import dataclasses

import pytest
import torch

import mla_suite
from mla_suite.core import checks, register


def test_a_device_pays_for_value_checks_in_debug_mode_alone():
    """Meta stands for a device: what is asked is its type."""
    calls: list[str] = []
    op = dataclasses.replace(register.get("plan"), validate=lambda args: calls.append(args.seq_lens.device.type))
    register._validate(op, (torch.empty(1, device="meta"), None), (1, 1, 1, 0, 0, 0))
    assert calls == []
    register._validate(op, (torch.empty(1), None), (1, 1, 1, 0, 0, 0))
    assert calls == ["cpu"]
    with mla_suite.debug():
        register._validate(op, (torch.empty(1, device="meta"), None), (1, 1, 1, 0, 0, 0))
        with mla_suite.debug(False):
            register._validate(op, (torch.empty(1, device="meta"), None), (1, 1, 1, 0, 0, 0))
    assert calls == ["cpu", "meta"]
    assert not checks.debugging()


@pytest.mark.parametrize("op", register.registry().values(), ids=register.registry())
def test_every_operator_with_indices_checks_their_values(op):
    assert op.validate is not None
