"""append_kv's own kernels on a real GPU: of tokens with one slot the last stays, wherever the others are."""

from __future__ import annotations

import pytest
import torch
from backend_calls import BackendCalls

import mla_suite
from mla_suite.core import dispatch
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.append_kv import APPEND_KV

DEVICE = torch.device("cuda")
REFERENCE = BackendCalls(APPEND_KV, "reference")

PAGE = 64
SLOTS = {
    "apart": lambda tokens: torch.randperm(tokens + PAGE)[:tokens],
    "seldom twice": lambda tokens: torch.randint(-1, 8 * tokens, (tokens,)) % (tokens + PAGE),
    "often": lambda tokens: torch.randint(-1, max(2, tokens // 3), (tokens,)),
    "once a workgroup": lambda tokens: torch.arange(tokens) % 12,
    "again, far away": lambda tokens: torch.arange(tokens) % (tokens // 2),
    "all one": lambda tokens: torch.full((tokens,), 7),
    "past the cache": lambda tokens: torch.randint(0, tokens, (tokens,)) + (torch.randint(0, 2, (tokens,)) << 32),
}


def beginning(tensor, at):
    """The same values, `at` elements behind where memory begins that is aligned."""
    room = torch.empty(at + len(tensor), dtype=tensor.dtype, device=tensor.device)
    room[at:] = tensor
    return room[at:]


def written(name, slots, interleaved, wide, first_slot=0, first_angle=0):
    """Returns a cache of zeros after the native kernel, and after the definition, which runs on the CPU. Slots begin
    `first_slot` elements behind aligned memory, each row of angles `first_angle`.
    """
    kind, tokens = get_kv_format(name), len(slots)
    rows = torch.randn(tokens, kind.head_dim).bfloat16()
    kv_c, k_pe = rows[:, : kind.latent], rows[:, kind.latent :]
    cos_sin = positions = None
    if kind.rope:
        cos_sin = torch.rand(100, kind.rope + first_angle).to(torch.float32 if wide else torch.bfloat16)
        positions = torch.where(slots < 0, 2**30, torch.arange(tokens) % 100).to(torch.int64 if wide else torch.int32)
    descale = torch.tensor([0.05]) if kind.per_tensor_descale else None
    empty = torch.zeros(tokens // PAGE + 2, PAGE, kind.head_dim)
    size = empty.shape[0] * PAGE
    left = []
    for device in (DEVICE, torch.device("cpu")):
        cache = caches.pack(kind, empty, descale=descale)
        fits = slots if device == DEVICE else torch.where(slots < size, slots, -1)
        narrow = fits if wide or int(fits.max()) >= 2**31 else fits.int()
        call = [kv_c, k_pe, cache, narrow, descale, cos_sin, positions]
        call = [None if each is None else each.to(device) for each in call]
        call[3] = beginning(call[3], first_slot)
        call[5] = None if call[5] is None else call[5][:, first_angle:]
        if device == DEVICE:
            problem = APPEND_KV.problem(*call, kv_format=name, interleaved=interleaved)
            choice = dispatch.choose("append_kv", APPEND_KV.backends, problem, dispatch.arch_of(call[0]), "cuda")
            if choice.backend.name != "native":
                pytest.skip(str(choice))
            torch.ops.mla_suite.append_kv(*call, kv_format=name, interleaved=interleaved)
        else:
            REFERENCE.run(None, (), *call, kv_format=name, interleaved=interleaved)
        left.append(caches.unpack(kind, call[2].cpu(), descale=descale))
    return left


# tokens: one to a workgroup, a dozen, 152, and with 70000 as many as it takes
SIZES = (
    *((300, "bf16"), (1500, "bf16"), (20_000, "bf16"), (300, "v32"), (1500, "v32")),
    *((300, "v41"), (20_000, "v41_vllm"), (300, "v41_fp4_interleaved"), (1500, "v41_fp4")),
    *((300, "v32_nope"), (1500, "v32_nope"), (20_000, "v32_nope")),
)
CASES = [(tokens, slots, name) for tokens, name in SIZES for slots in SLOTS]


@pytest.mark.parametrize(("tokens", "slots", "name"), [*CASES, (70_000, "often", "bf16")])
def test_the_last_of_equal_slots_stays(tokens, slots, name):
    torch.manual_seed(tokens)
    for turn in range(2):
        mine, theirs = written(name, SLOTS[slots](tokens), interleaved=turn == 0, wide=turn == 0)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("first_slot", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1500, 1502, 1503])
def test_slots_begin_and_end_anywhere(tokens, first_slot):
    """Slots are read 16 bytes at a time: the first and the last lie in some that are not all slots."""
    for turn in range(2):
        mine, theirs = written("bf16", SLOTS["often"](tokens), turn == 0, turn == 0, first_slot=first_slot)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("tokens", [300, 1500])
def test_angles_begin_anywhere(tokens):
    for turn in range(2):
        mine, theirs = written("bf16", SLOTS["often"](tokens), turn == 0, turn == 0, first_angle=1)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("tokens", [300, 1500])
def test_every_value_there_is(tokens):
    """Every bf16, in latents and in what is rotated; NaN is stored as the positive quiet one."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    rows = values.repeat(-(-tokens * 576 // len(values)))[: tokens * 576].view(tokens, 576)
    for interleaved in (True, False):
        left = []
        for device in (DEVICE, torch.device("cpu")):
            cache = torch.zeros(tokens // PAGE + 1, PAGE, 576, dtype=torch.bfloat16, device=device)
            angles = torch.linspace(-1, 1, 6400).view(100, 64).to(device), torch.arange(tokens, device=device) % 100
            slots = torch.arange(tokens, device=device)
            call = rows[:, :512].to(device), rows[:, 512:].to(device), cache, slots, None, *angles
            mla_suite.append_kv(*call, kv_format="bf16", interleaved=interleaved)
            left.append(cache.cpu())
        mine, theirs = left
        quiet = torch.where(theirs.isnan(), 0x7FC0, theirs.view(torch.int16))
        assert torch.equal(mine.view(torch.int16), quiet.to(torch.int16))
