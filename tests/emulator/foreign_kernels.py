"""Programs for compilers that are not ours: Triton and Gluon kernels, compiled without a GPU for test_foreign.py."""

# mypy: ignore-errors
# Triton's language is not typed.
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna3
from triton.experimental.gluon.language.amd.cdna4 import async_copy


@triton.jit
def matmul(
    a, b, c, M, N, K: tl.constexpr, stride_bk: tl.constexpr, stride_bn: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """c [M, N] f32 = a [M, K] b; masks on rows and columns; b of any orientation."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rows[:, None] * K + (k + depth)[None, :], mask=rows[:, None] < M, other=0.0)
        at = (k + depth)[:, None] * stride_bk + columns[None, :] * stride_bn
        y = tl.load(b + at, mask=columns[None, :] < N, other=0.0)
        total = tl.dot(x, y, total)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], total, mask=inside)


@triton.jit
def scaled(
    a, a_scale, b, b_scale, c, K: tl.constexpr, FORMAT_A: tl.constexpr, FORMAT_B: tl.constexpr, PACK_A: tl.constexpr,
    PACK_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROW_MAJOR_B: tl.constexpr
):  # fmt: skip
    """c = a b with a scale per 32 elements of K: a [BM, K / PACK_A], b [K / PACK_B, BN] or transposed, scales E8M0."""
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    da, db, ds = tl.arange(0, BK // PACK_A), tl.arange(0, BK // PACK_B), tl.arange(0, BK // 32)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rows[:, None] * (K // PACK_A) + (k // PACK_A + da)[None, :])
        if ROW_MAJOR_B:
            y = tl.load(b + (k // PACK_B + db)[:, None] * BN + columns[None, :])
        else:
            y = tl.load(b + (k // PACK_B + db)[:, None] + columns[None, :] * (K // PACK_B))
        sx = tl.load(a_scale + rows[:, None] * (K // 32) + (k // 32 + ds)[None, :])
        sy = tl.load(b_scale + columns[:, None] * (K // 32) + (k // 32 + ds)[None, :])
        total = tl.dot_scaled(x, sx, FORMAT_A, y, sy, FORMAT_B, total)
    tl.store(c + rows[:, None] * BN + columns[None, :], total)


@gluon.jit
def gluon_matmul(
    a, b, c, VERSION: gl.constexpr, SIZE: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, DIRECT: gl.constexpr
):  # fmt: skip
    """64 x 64 x 64 of bf16 through LDS, which buffer loads write or, swizzled, registers, and a layout by hand."""
    block: gl.constexpr = gl.BlockedLayout([1, 8], [8, 8], [4, 1], [1, 0])
    matrix: gl.constexpr = AMDMFMALayout(
        version=VERSION, instr_shape=[SIZE, SIZE, DEPTH], transposed=True, warps_per_cta=[2, 2]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, matrix, WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(1, matrix, WIDTH)
    i = gl.arange(0, 64, gl.SliceLayout(1, block))
    j = gl.arange(0, 64, gl.SliceLayout(0, block))
    at = i[:, None] * 64 + j[None, :]
    if DIRECT:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        sx = gl.allocate_shared_memory(gl.bfloat16, [64, 64], plain)
        sy = gl.allocate_shared_memory(gl.bfloat16, [64, 64], plain)
        async_copy.buffer_load_to_shared(sx, a, at)
        async_copy.buffer_load_to_shared(sy, b, at)
        async_copy.commit_group()
        async_copy.wait_group(0)
    else:
        shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 8, [1, 0])
        sx = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared, cdna3.buffer_load(a, at))
        sy = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared, cdna3.buffer_load(b, at))
    total = cdna3.mfma(sx.load(left), sy.load(right), gl.zeros([64, 64], gl.float32, matrix))
    im = gl.arange(0, 64, gl.SliceLayout(1, matrix))
    jm = gl.arange(0, 64, gl.SliceLayout(0, matrix))
    cdna3.buffer_store(total, c, im[:, None] * 64 + jm[None, :])
