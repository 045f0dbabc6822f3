"""How many workers a plan is cut for."""

from __future__ import annotations

import torch

from mla_suite import launch
from mla_suite.launch.device import compute_units
from mla_suite.ops.decode import hopper
from mla_suite.ops.decode.config import MOST_ROWS

TILE_ROWS = {"sm_90": hopper.ROWS}  # query rows that a workgroup holds; elsewhere MOST_ROWS


def workers(tensor: torch.Tensor, rows: int) -> int:
    """Pieces of keys that a device works on at a time, for `plan(workers=...)`.

    tensor  any tensor on the device, or on the CPU while an arch is emulated
    rows    query rows of a sequence, q_len x heads: each tile of them takes a compute unit beside the others

    -> compute units over tiles of rows, at least 1; ValueError for rows below 1.
    More workers than that are right too, but their pieces wait for each other and cost a merge.
    In compiled code the device is looked at once, when it is traced.
    """
    if rows < 1:
        raise ValueError(f"workers: rows is {rows}; give q_len x heads, 1 or more")
    units, tile = _units_and_tile(tensor.device)
    return max(1, units // -(-rows // tile))


def _units_and_tile(device: torch.device) -> tuple[int, int]:
    """Compute units of a device, and the query rows that a workgroup holds there."""
    arch = launch.current_arch(torch.empty(0, device=device))
    tile = TILE_ROWS.get(arch.name, MOST_ROWS) if arch is not None else MOST_ROWS
    emulated = None if device.type == "cuda" else arch
    return emulated.compute_units if emulated is not None else compute_units(device), tile


# torch.compiler.assume_constant_result sets this mark, but imports torch._dynamo to do so: 2 s and 130 MB.
_units_and_tile._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any attribute
