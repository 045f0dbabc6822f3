"""Published kernels in the model of time: a few facts about each, and the chip around them.

Their machine code is not here, so no wave of theirs is played. What is known of each is the geometry that its name or
source states (query rows of a workgroup, how many waves read every key, which matrix instructions, how many splits) and
from that follow the clocks per key of a compute unit's resources. The chip around them is the one that our own launches
are modelled on: launch floor, splits over compute units, shares of memory, clocks under matrix load.
"""

from __future__ import annotations

from dataclasses import dataclass

from amd_points import Point

from mla_suite.emulator.timing import CHIP, UNITS, Chip, Unit, fetched, matrix_clock

LATENT, ROPE = 512, 64
RECORD_BYTES = {"bf16": 1152, "fp8": 576, "dsv4": 584}
CHAIN = 6
"""Loads that wait for each other before the first key is there and after the last: arguments, work tile, page number,
queries, key, and the store of the result."""
MERGE_CHAIN = 4
"""Those of a reduction: arguments, its map, partial results, and the store."""


@dataclass(frozen=True)
class Peer:
    """What is known of an implementation.

    rows        query rows that a workgroup holds at most; a problem with more takes several, each reads every key
    row_waves   waves of a workgroup that read every key from LDS, each for other rows
    max_splits  KV splits of a sequence at most; `persistent` kernels fill the compute units exactly, others by whole
                splits
    groups      workgroups that a compute unit holds
    converts    whether fp8 keys become bf16 before they are multiplied
    qk_half, pv_half  whether that product of fp8 keys uses 16x16x32 instructions, on gfx950 at half of fp8's rate;
                those of the full rate need 128 keys at once for P V
    counted     clocks per key of matrix units, vector units and LDS, where the object was run in the emulator
    """

    rows: int
    row_waves: int
    max_splits: int
    persistent: bool = True
    groups: int = 1
    converts: bool = False
    qk_half: bool = False
    pv_half: bool = True
    counted: tuple[float, float, float] | None = None


AITER_FP8_128_ROWS = (68.0, 61.0, 72.0)
"""AITER's `mla_a8w8_qh128_m32x4_n16x2`, counted per key at 1,024 keys. The object is not kept."""


# Sources: aiter's kernel names (m32x4 is 4 waves of 32 rows), hsa/*/mla/mla_asm.csv, csrc/kernels/mla/hk and opus,
# pull request 5651 (opus tiles), aiter/ops/triton/gluon/README.md (Gluon tiles and splits), 32 splits from the default
# of op_tests/test_mla_persistent.py and 16 from get_meta_param of aiter/mla.py. Splits of sparse kernels are guesses.
def peer(point: Point) -> Peer:
    """The geometry of a point's implementation for its problem."""
    rows, name = point.heads * point.q_len, point.implementation
    fp8 = point.kv_dtype == "fp8" and point.q_dtype == "fp8"
    if point.kind == "sparse":
        if name == "aiter-asm":
            return Peer(16, 1, 32)
        own_splits = {"aiter-gluon": 32, "aiter-gluon-fp8": 32, "sglang-tilelang": 32, "sglang-triton": 32}
        return Peer(16, 1, own_splits.get(name, 16), persistent=False, converts=not fp8, groups=2)
    if name == "aiter-asm":
        if not fp8:
            persistent = point.source.name == "aiter-4582"  # the README's rows are those of test_mla.py
            return Peer(64 if rows > 16 else 16, 4 if rows > 16 else 1, 32 if persistent else 16, persistent)
        return Peer(min(rows, 128), 4 if rows >= 64 else 1, 32, counted=AITER_FP8_128_ROWS if rows >= 128 else None)
    if name.startswith("aiter-hk"):
        return Peer(128, 8, 32, qk_half=True)
    if name == "aiter-opus":
        if fp8:
            return Peer(128, 8, 32) if rows >= 128 else Peer(32, 1, 32)
        return Peer(128, 4, 32) if rows >= 128 else Peer(32, 1, 32)
    if name == "aiter-gluon":
        if rows > 16 and point.q_len == 1:
            return Peer(64, 4, 4, persistent=False)
        splits = point.splits or max(1, 256 // point.batch)
        return Peer(16, 1, splits, persistent=False, groups=2, converts=point.kv_dtype == "fp8")
    raise ValueError(f"{point}: nothing is known of {name}")


EXPOSED = 0.214
"""Of a loop's shorter resources in peers' kernels, the share that is not hidden behind its longest: fitted by
fit_amd_time.py on the same points as `timing.CHIP`."""


@dataclass(frozen=True)
class Modelled:
    """Microseconds of a point, by part, and its class: what the largest part is bound by."""

    us: float
    launch: float
    memory: float
    matrix: float
    lds: float
    vector: float

    @property
    def bound(self) -> str:
        """launch, memory or matrix; the LDS and the vector unit feed the products and count as matrix."""
        parts = {"launch": self.launch, "memory": self.memory, "matrix": max(self.matrix, self.lds, self.vector)}
        return max(parts, key=lambda name: parts[name])


def predict(point: Point, chip: Chip = CHIP, exposed: float = EXPOSED) -> Modelled:
    """The modelled device time of a published point."""
    card, unit = point.card, UNITS[point.card.arch]
    slow = 2400 / card.clock_mhz
    stream = card.memory_gb_per_s * chip.memory_share * 1e3  # bytes per us
    if point.kind == "reduce":
        read = point.batch * point.heads * point.splits * LATENT * 4 / stream
        floor = slow * chip.launch_us + MERGE_CHAIN * unit.memory_latency / card.clock_mhz
        return Modelled(floor + read, floor, read, 0.0, 0.0, 0.0)
    geometry, rows = peer(point), point.heads * point.q_len
    units = card.compute_units
    pieces = point.batch * -(-rows // geometry.rows)
    tile = max(16, min(geometry.rows, -(-rows // -(-rows // geometry.rows) // 16) * 16))
    splits = min(geometry.max_splits, max(1, -(-point.ctx // 32)))
    if geometry.persistent:
        active = min(units, pieces * splits)
        keys = pieces * point.ctx / active
        splits = min(splits, max(1, -(-units // pieces)))
    else:
        splits = point.splits or min(splits, max(1, geometry.groups * units // pieces))
        slots = units * geometry.groups
        rounds = -(-pieces * splits // slots)
        active = min(units, pieces * splits)
        keys = rounds * min(geometry.groups, -(-pieces * splits // units)) * point.ctx / splits
    once = fetched(pieces / point.batch)
    per_key = _clocks(point, geometry, tile, unit)
    mhz = float(card.clock_mhz)
    queries = splits * (LATENT + ROPE) * (1 if point.q_dtype == "fp8" else 2)  # every split reads them
    moved = point.batch * rows * (queries + LATENT * 2)
    loop = own = chain = 0.0
    for _ in range(5):  # the clock falls with the matrix units' load of a workgroup's time, which depends on the clock
        parts = {name: keys * clocks / mhz for name, clocks in per_key.items()}
        share = min(stream / active, unit.memory_rate * mhz)
        parts["memory"] = keys * RECORD_BYTES[point.kv_dtype] * once / share
        longest = max(parts.values())
        loop = longest + exposed * (sum(parts.values()) - longest)
        own = moved / min(stream, active * unit.memory_rate * mhz)
        chain = CHAIN * unit.memory_latency / mhz
        mhz = card.clock_mhz * matrix_clock(chip, parts["matrix"] / (chain + own + loop))
    launch = chip.launch_us * slow + chain
    merged = point.batch * rows * splits * LATENT * 8 / stream if splits > 1 else 0.0  # written and read
    merge = chip.launch_us * slow + MERGE_CHAIN * unit.memory_latency / card.clock_mhz
    total = launch + own + loop + merge + merged
    return Modelled(
        total, launch + merge, parts["memory"] + own + merged, parts["matrix"], parts["lds"], parts["vector"]
    )


def _clocks(point: Point, geometry: Peer, tile: int, unit: Unit) -> dict[str, float]:
    """Clocks per key of a workgroup's matrix units, LDS and vector units, if each had nothing else to wait for."""
    if geometry.counted:
        return dict(zip(("matrix", "vector", "lds"), geometry.counted, strict=True))
    width = 1 if point.kv_dtype in ("fp8", "dsv4") else 2
    fp8_products = width == 1 and not geometry.converts and point.q_dtype == "fp8"
    halves = point.card.arch == "gfx950"
    head = LATENT if point.kv_dtype == "dsv4" else LATENT + ROPE
    matrix = 0.0
    for columns, half in ((head, geometry.qk_half), (LATENT, geometry.pv_half)):
        doubled = fp8_products and not (half and halves)
        matrix += 2 * tile * columns / (unit.matrix_flops * (2 if doubled else 1))
    read = geometry.row_waves * (head + LATENT) * width + head * width
    softmax = tile / 64 * unit.softmax_clocks / 4
    convert = head / 64 * 2 * 4 / 4 if geometry.converts and width == 1 else 0.0
    return {"matrix": matrix, "lds": read / 128, "vector": softmax + convert}
