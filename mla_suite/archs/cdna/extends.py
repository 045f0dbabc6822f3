"""How long decode takes for many query tokens on CDNA, by the row tiles that they are divided into.

The query tokens of an extend see ever more keys, and a row tile reads what its last row sees. The last tiles start
first, and a compute unit that is done takes the next workgroup. So a call lasts as long as the largest of

    the longest workgroup
    all workgroups, divided among the compute units
    r times the workgroup number (r - 1) units + 1, since one of so many is the r-th on its unit

times what a key takes in the loop (splits.py), and what queries, results and a combine take. Larger tiles take less
time for a row, and smaller ones are spread more evenly.
"""

from __future__ import annotations

import numpy as np

from mla_suite.archs import ArchSpec
from mla_suite.archs.cdna.splits import Kind, LoopCosts
from mla_suite.core.prepared import ceil_div
from mla_suite.ops.plan.scheduler import round_up

FEWEST_TOKENS = 33  # of which row tiles leave out keys (csrc/cdna/decode/kernel.hpp)
START = 8_000  # clocks of a workgroup beside these: a round number, modelled launches leave up to 23,000 a turn
WORTH = 0.9
"""Of the largest tile's clocks, below which a smaller tile is taken: modelled launches are up to a fifth from these."""


def workgroup_keys(heads: int, q_len: int, keys: int, rows: int, splits: int) -> np.ndarray:
    """Keys of each workgroup of a sequence, the most first, in tiles of `rows` query rows and as many splits."""
    tiles, size = ceil_div(heads * q_len, rows), round_up(ceil_div(keys, splits))
    last = np.minimum(np.arange(1, tiles + 1) * rows, heads * q_len) - 1
    seen = np.maximum(keys - (q_len - 1 - last // heads), 0)
    return np.sort(np.clip(seen[:, None] - size * np.arange(splits), 0, size), axis=None)[::-1]


def clocks(
    cost: LoopCosts,
    arch: ArchSpec,
    kind: Kind,
    rows: int,
    splits: int,
    batch: int,
    heads: int,
    q_len: int,
    keys: int,
    width: int,
    head_dim_v: int,
) -> float:
    """Clocks of `batch` causal extends of `q_len` tokens, the last of `keys` keys, in tiles of `rows` query rows."""
    own_keys, units = workgroup_keys(heads, q_len, keys, rows, splits), arch.compute_units
    count = batch * len(own_keys)
    turns, busy = ceil_div(count, units), min(count, units)
    in_turns = max(turn * int(own_keys[(turn - 1) * units // batch]) for turn in range(1, turns + 1))
    longest = max(in_turns, float(own_keys.sum()) * batch / units)
    own = (cost.own_bytes(kind, rows, splits > 1, width, head_dim_v) / cost.rate(busy) + START) * turns
    partials = heads * q_len * batch * splits * 4 * head_dim_v
    merge = cost.combine + partials / cost.chip_bytes if splits > 1 else 0.0
    return cost.key_clocks(arch, kind, rows, ceil_div(heads * q_len, rows), busy, width) * longest + own + merge
