"""Published kernels in the model of time: a few facts about each, and the chip around them.

Their machine code is not here. What is known of most is the geometry that a name or a source states (query rows of a
workgroup, how many waves read every key, which matrix instructions, how many splits), and from that follow the clocks
per key of a compute unit's resources. Open ones in Triton were compiled, and their waves played in the emulator as ours
are. The chip around them is the one that our own launches are modelled on: launch floor, splits over compute units,
shares of memory, clocks under matrix load.
"""

from __future__ import annotations

from dataclasses import dataclass

from amd_points import Point

from mla_suite.emulator.timing import BOUNDS, CHIP, UNITS, Chip, Unit, fetched, matrix_clock

LATENT, ROPE = 512, 64
RECORD_BYTES = {"bf16": 1152, "fp8": 576, "dsv4": 584}
CHAIN = 6
"""Loads that wait for each other before the first key is there and after the last: arguments, work tile, page number,
queries, key, and the store of the result."""
MERGE_CHAIN = 4
"""Those of a reduction: arguments, its map, partial results, and the store."""


@dataclass(frozen=True)
class Played:
    """Clocks that the emulator's waves took of a workgroup with memory for itself, beside those that share its unit.

    fixed, key  without keys, and of each key; `matrix` of these are the matrix units'
    tile        keys that the loop takes at once
    """

    fixed: float
    key: float
    matrix: float
    tile: int


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
    played      of a kernel whose waves were played
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
    played: Played | None = None


AITER_FP8_128_ROWS = (68.0, 61.0, 72.0)
"""AITER's `mla_a8w8_qh128_m32x4_n16x2`, counted per key at 1,024 keys. The object is not kept. gfx942's of 64 rows has
the same instructions for a key: half of its rows are empty."""
AITER_FP8_32_HEADS_OF_4 = (34.0, 50.4, 38.5)
"""AITER's `mla_a8w8_qh32_qseqlen4_gqaratio32_ps` of March 2026, 128 rows in products of the full rate: instructions of
its loop for 64 keys, with no bank conflict."""
AITER_BF16_128_ROWS = (136.0, 96.0, 141.0)
"""AITER's `mla_dec_stage1_bf16_a16w16_subQ128_mqa128`, of the same instructions for both archs, as above."""

# Compiled for gfx950 as their launchers ask, for one sequence of two lengths: a key is what these differ by. Registers
# or LDS leave a compute unit one workgroup but for SGLang's of two waves. The splits of both servers' points are those
# that their launchers choose.
VLLM_TRITON = Played(7352, 400.0, 22.5, 32)
"""`_sparse_attn_decode_partial_kernel` of vLLM 0.33, by Triton 3.6: pull request 52212 left it as 44899 had it."""
SGLANG_TRITON = (Played(9424, 78.7, 14.0, 64), Played(12885, 87.1, 18.0, 64))
"""`_sparse_mla_split_k_kernel` of SGLang 0.5.23, by Triton 3.6: of four waves, and of two, where two share a unit."""
GLUON_16_ROWS = {"bf16": Played(7055, 62.9, 8.5, 64), "fp8": Played(6503, 44.0, 8.5, 128)}
GLUON_64_ROWS = Played(11099, 144.5, 34.0, 64)
"""AITER's `mla_gluon.py` of August 2026, by Triton 3.8; the other one by its cache."""


# Sources: aiter's kernel names (m32x4 is 4 waves of 32 rows), hsa/*/mla/mla_asm.csv, csrc/kernels/mla/hk and opus,
# pull request 5651 (opus tiles), aiter/ops/triton/gluon/README.md (Gluon tiles and splits), 32 splits from the default
# of op_tests/test_mla_persistent.py and 16 from get_meta_param of aiter/mla.py. Splits of AITER's and TileLang's sparse
# kernels are guesses.
def peer(point: Point) -> Peer:
    """The geometry of a point's implementation for its problem."""
    rows, name = point.heads * point.q_len, point.implementation
    fp8 = point.kv_dtype == "fp8" and point.q_dtype == "fp8"
    if point.kind == "sparse":
        if name == "aiter-asm":
            return Peer(16, 1, 32)
        if name == "vllm-triton":
            return Peer(16, 1, 16, persistent=False, played=VLLM_TRITON)
        if name == "sglang-triton":
            pair = point.batch * point.splits > point.card.compute_units
            return Peer(16, 1, 32, persistent=False, groups=2 if pair else 1, played=SGLANG_TRITON[pair])
        return Peer(16, 1, 32, persistent=False, converts=not fp8, groups=2)
    if name == "aiter-asm":
        if not fp8:
            persistent = point.source.name == "aiter-4582"  # the README's rows are those of test_mla.py
            if point.heads == 128:
                return Peer(128, 4, 16, persistent, counted=AITER_BF16_128_ROWS)
            return Peer(64 if rows > 16 else 16, 4 if rows > 16 else 1, 32 if persistent else 16, persistent)
        counted = AITER_FP8_128_ROWS if rows >= (128 if point.card.arch == "gfx950" else 64) else None
        if point.card.arch == "gfx950" and (point.heads, point.q_len) == (32, 4):
            counted = AITER_FP8_32_HEADS_OF_4
        return Peer(min(rows, 128), 4 if rows >= 64 else 1, 32, counted=counted)
    if name.startswith("aiter-hk"):
        return Peer(128, 8, 32, qk_half=True)
    if name == "aiter-opus":
        if fp8:
            return Peer(128, 8, 32) if rows >= 128 else Peer(32, 1, 32)
        return Peer(128, 4, 32) if rows >= 128 else Peer(32, 1, 32)
    if name == "aiter-gluon":
        if rows > 16 and point.q_len == 1:
            return Peer(64, 4, 4, persistent=False, played=GLUON_64_ROWS)
        splits = point.splits or max(1, 256 // point.batch)
        if point.card.arch == "gfx950":
            return Peer(16, 1, splits, persistent=False, played=GLUON_16_ROWS[point.kv_dtype])
        return Peer(16, 1, splits, persistent=False, groups=2, converts=point.kv_dtype == "fp8")
    raise ValueError(f"{point}: nothing is known of {name}")


def known(point: Point) -> str:
    """What an implementation is modelled from."""
    if point.kind == "reduce":
        return "bytes"
    geometry = peer(point)
    return "its waves" if geometry.played else "counts of its object" if geometry.counted else "its geometry"


EXPOSED = 0.257
"""Of a loop's shorter resources in peers' kernels, the share that is not hidden behind its longest: fitted by
fit_amd_time.py on the same points as `timing.CHIP`."""


@dataclass(frozen=True)
class Modelled:
    """A point's time by part. LDS and vector units feed the products and count as matrix, as played waves do."""

    us: float
    launch: float
    memory: float
    matrix: float

    @property
    def bound(self) -> str:
        """The class: launch, memory or matrix, whichever part is the largest."""
        return max(BOUNDS, key=lambda name: float(getattr(self, name)))


def read(point: Point) -> int:
    """Bytes of keys, or of partial results, that memory has for a problem."""
    if point.kind == "reduce":
        return point.batch * point.heads * point.splits * LATENT * 4
    return point.batch * point.ctx * RECORD_BYTES[point.kv_dtype]


def from_caches(point: Point) -> bool:
    """Whether memory takes longer for a point's bytes than was published: then its queries shared keys in a cache."""
    return point.us < read(point) / (point.card.memory_gb_per_s * 1e3)


def predict(point: Point, chip: Chip = CHIP, exposed: float = EXPOSED) -> Modelled:
    """The modelled device time of a published point."""
    card, unit = point.card, UNITS[point.card.arch]
    slow = 2400 / card.clock_mhz
    stream = card.memory_gb_per_s * chip.memory_share * 1e3  # bytes per us
    if point.kind == "reduce":
        floor, taken = slow * chip.launch_us + MERGE_CHAIN * unit.memory_latency / card.clock_mhz, read(point) / stream
        return Modelled(floor + taken, floor, taken, 0.0)
    geometry, rows = peer(point), point.heads * point.q_len
    units = card.compute_units
    pieces = point.batch * -(-rows // geometry.rows)
    tile = max(16, min(geometry.rows, -(-rows // -(-rows // geometry.rows) // 16) * 16))
    splits = min(geometry.max_splits, max(1, -(-point.ctx // 32)))
    if geometry.persistent:
        rounds = 1
        active = min(units, pieces * splits)
        keys = pieces * point.ctx / active
        splits = min(splits, max(1, -(-units // pieces)))
    else:
        splits = point.splits or min(splits, max(1, geometry.groups * units // pieces))
        slots = units * geometry.groups
        rounds = -(-pieces * splits // slots)
        active = min(units, pieces * splits)
        keys = rounds * min(geometry.groups, -(-pieces * splits // units)) * point.ctx / splits
    waits = CHAIN * unit.memory_latency
    if played := geometry.played:
        keys *= -(-point.ctx // (splits * played.tile)) * played.tile * splits / point.ctx  # in whole tiles
        waits = rounds * played.fixed
    once = fetched(pieces / point.batch)
    per_key = _clocks(point, geometry, tile, unit)
    products = per_key.pop("matrix") if geometry.played else per_key["matrix"]  # played waves have waited for them
    mhz = float(card.clock_mhz)
    queries = splits * (LATENT + ROPE) * (1 if point.q_dtype == "fp8" else 2)  # every split reads them
    moved = point.batch * rows * (queries + LATENT * 2)
    loop = own = chain = 0.0
    for _ in range(5):  # the clock falls with the load of all matrix units of the chip, which depends on the clock
        parts = {name: keys * clocks / mhz for name, clocks in per_key.items()}
        share = min(stream / active, unit.memory_rate * mhz)
        parts["memory"] = keys * RECORD_BYTES[point.kv_dtype] * once / share
        longest = max(parts.values())
        loop = longest + exposed * (sum(parts.values()) - longest)
        own = moved / min(stream, active * unit.memory_rate * mhz)
        chain = waits / mhz
        load = active / units * keys * products / mhz / (chain + own + loop)
        mhz = card.clock_mhz * matrix_clock(chip, load)
    launch = chip.launch_us * slow + chain
    merged = point.batch * rows * splits * LATENT * 8 / stream if splits > 1 else 0.0  # written and read
    merge = chip.launch_us * slow + MERGE_CHAIN * unit.memory_latency / card.clock_mhz
    total = launch + own + loop + merge + merged
    memory = parts.pop("memory") + own + merged
    return Modelled(total, launch + merge, memory, max(parts.values()))


def _clocks(point: Point, geometry: Peer, tile: int, unit: Unit) -> dict[str, float]:
    """Clocks per key of a workgroup's matrix units, LDS and vector units, if each had nothing else to wait for; of one
    that was played those of its matrix units and of all."""
    if played := geometry.played:
        return {"matrix": played.matrix / geometry.groups, "waves": played.key / geometry.groups}
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
