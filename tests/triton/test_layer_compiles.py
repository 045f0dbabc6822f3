"""The layer's Triton kernels compile for NVIDIA GPUs at a model's sizes, within a block's shared memory.

The interpreter runs them without their types, so what it takes may not compile.
"""

import os
from collections.abc import Callable

import pytest
import torch

from mla_suite import archs as arch
from mla_suite.models import absorb, qkv_down_proj

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing; the process around it does"
)
TOKENS, HEADS = 70, 4
UP = torch.zeros(TOKENS, 1, HEADS, 192, dtype=torch.bfloat16)
BOTH = torch.zeros(HEADS, 256, 512, dtype=torch.bfloat16)
WEIGHTS = torch.zeros(1536, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
OUT = tuple(torch.zeros(TOKENS, size, dtype=torch.bfloat16) for size in (1536, 512, 64))


def absorption(turned: bool) -> None:
    table = (torch.zeros(9, 64), torch.zeros(TOKENS, dtype=torch.int64)) if turned else (None, None)
    absorb._absorb(*UP.split([128, 64], dim=-1), BOTH[:, :128], *table, True)


def values() -> None:
    absorb._head_values(torch.zeros(TOKENS, 1, HEADS, 512, dtype=torch.bfloat16), BOTH[:, 128:])


def norms(parts: int) -> None:
    given = torch.zeros(parts, TOKENS, 2112, dtype=torch.float32 if parts > 1 else torch.bfloat16)
    qkv_down_proj._add_and_norm(given, *WEIGHTS, 1e-6, 1e-6, OUT)


LAUNCHES = {
    "absorption": lambda: absorption(True),
    "absorption, rotated before": lambda: absorption(False),
    "values": values,
    "parts added and normed": lambda: norms(qkv_down_proj.PARTS),
    "normed": lambda: norms(1),
}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.parametrize(("capability", "limit"), [(90, arch.get("sm_90").lds_bytes), (89, 101376)])
def test_kernel(monkeypatch: pytest.MonkeyPatch, launch: Callable[[], None], capability: int, limit: int) -> None:
    from nvidia_offline import first_launch, shared_bytes

    monkeypatch.setattr(absorb, "stages", lambda device: 4 if capability >= 90 else 2)
    assert 0 < shared_bytes(*first_launch(launch), capability) <= limit
