"""append_kv's own kernels on a real GPU: of tokens with one slot the last stays, wherever the others are."""

from __future__ import annotations

import pytest
import torch

from mla_suite.core import dispatch
from mla_suite.core.layouts import cache as caches
from mla_suite.core.layouts import layout as declared
from mla_suite.ops.append_kv import APPEND_KV, reference

DEVICE = torch.device("cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")

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


def written(name, slots, interleaved, wide):
    """What the native kernel leaves in a cache of zeros, and the definition, which runs on the CPU."""
    kind, tokens = declared(name), len(slots)
    rows = torch.randn(tokens, kind.head_dim).bfloat16()
    kv_c, k_pe = rows[:, : kind.latent], rows[:, kind.latent :]
    cos_sin = torch.rand(100, kind.rope).to(torch.float32 if wide else torch.bfloat16)
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
        if device == DEVICE:
            problem = APPEND_KV.problem(*call, layout=name, interleaved=interleaved)
            choice = dispatch.choose("append_kv", APPEND_KV.backends, problem, dispatch.arch_of(call[0]), "cuda")
            if choice.backend.name != "native":
                pytest.skip(str(choice))
            torch.ops.mla_suite.append_kv(*call, layout=name, interleaved=interleaved)
        else:
            reference.run(None, (), *call, layout=name, interleaved=interleaved)
        left.append(caches.unpack(kind, call[2].cpu(), descale=descale))
    return left


# tokens: one to a workgroup, a dozen, 152, and with 70000 as many as it takes
SIZES = ((300, "bf16"), (1500, "bf16"), (20_000, "bf16"), (300, "v32"), (1500, "v32"))
CASES = [(tokens, slots, name) for tokens, name in SIZES for slots in SLOTS]


@pytest.mark.parametrize(("tokens", "slots", "name"), [*CASES, (70_000, "often", "bf16")])
def test_the_last_of_equal_slots_stays(tokens, slots, name):
    torch.manual_seed(tokens)
    for turn in range(2):
        mine, theirs = written(name, SLOTS[slots](tokens), interleaved=turn == 0, wide=turn == 0)
        assert torch.equal(mine, theirs)
