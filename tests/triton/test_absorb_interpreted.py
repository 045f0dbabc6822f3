"""Products with a matrix per head in Triton give torch's numbers, run by Triton's interpreter on the CPU.

The interpreter's bf16 dot is wrong (Triton 3.6), so operands are fp16. bf16 runs where there is a GPU, in
tests/gpu/test_layer_on_gpu.py.
"""

import pytest
import torch

from mla_suite import testing
from mla_suite.models import absorb

HEADS, LATENT, ROPE, LENGTH = 3, 256, 64, 40


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisons the outputs, so that an element no kernel wrote is seen."""
    for name in ("_empty_absorb", "_empty_values"):
        empty = getattr(absorb, name)
        monkeypatch.setattr(absorb, name, lambda *given, empty=empty: testing.poison(empty(*given)))


def operands(tokens: int, inner: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_nope and q_pe as views of one product, and both views of kv_b_proj."""
    torch.manual_seed(seed)
    up = torch.randn(tokens, 1, HEADS, inner + ROPE).half()
    both = (torch.randn(HEADS, 2 * inner, LATENT) / 16).half()
    return *up.split([inner, ROPE], dim=-1), *both.split([inner, inner], dim=1)


@pytest.mark.parametrize("tokens", [1, 70])  # one block of tokens, and one and a part
@pytest.mark.parametrize("rotated", ["interleaved", "halves", "not"])
@pytest.mark.parametrize("programs", [1, absorb.PROGRAMS], ids=["a head a program", "a head in parts"])
def test_absorption(monkeypatch: pytest.MonkeyPatch, tokens: int, rotated: str, programs: int) -> None:
    monkeypatch.setattr(absorb, "PROGRAMS", programs)
    monkeypatch.setattr(absorb, "HEADS", 2)  # of three
    q_nope, q_pe, w_uk, _ = operands(tokens, 32)
    turn = (torch.randn(LENGTH, ROPE), torch.randint(LENGTH, (tokens,))) if rotated != "not" else (None, None)
    got = absorb._absorb(q_nope, q_pe, w_uk, *turn, rotated == "interleaved")
    expected = absorb.absorbed(q_nope, q_pe, w_uk, *turn, interleaved=rotated == "interleaved")
    assert got.shape == (tokens, 1, HEADS, LATENT + ROPE)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_a_position_past_the_table_is_nan() -> None:
    q_nope, q_pe, w_uk, _ = operands(3, 16)
    got = absorb._absorb(q_nope, q_pe, w_uk, torch.ones(LENGTH, ROPE), torch.tensor([0, LENGTH, -1]), True)
    assert got[0].isfinite().all()
    assert got[1:, ..., LATENT:].isnan().all()


@pytest.mark.parametrize("tokens", [1, 150])
@pytest.mark.parametrize("inner", [32, 128])
def test_values(tokens: int, inner: int) -> None:
    *_, w_uv = operands(tokens, inner)
    latents = torch.randn(tokens, 1, HEADS, LATENT).half()
    got = absorb._head_values(latents, w_uv)
    torch.testing.assert_close(got, absorb.head_values(latents, w_uv).contiguous(), rtol=2e-3, atol=4e-3)


def test_no_tokens() -> None:
    q_nope, q_pe, w_uk, w_uv = operands(0, 32)
    assert absorb._absorb(q_nope, q_pe, w_uk, None, None, True).shape == (0, 1, HEADS, LATENT + ROPE)
    assert absorb._head_values(torch.zeros(0, 1, HEADS, LATENT).half(), w_uv).shape == (0, 1, HEADS, 32)
