"""The chains by which the bench's tests tell cold caches from warm ones: each goes through lines of its own."""

import torch
from chase_kernel import HOPS, WORDS, chains, chase


def test_every_chain_ends_where_it_should() -> None:
    lines, found = chains(5, torch.device("cpu")), torch.zeros(5, dtype=torch.int32)
    assert lines.shape == (5 * HOPS, WORDS)
    chase(lines, found)
    assert found.tolist() == [-1, -2, -3, -4, -5]
    following = lines[:, 0]
    assert len(following.unique()) == 5 * HOPS, "no line has two that lead to it"
    lines[following == -1] = -9  # the last line of the first chain
    chase(lines, found)
    assert found.tolist() == [-9, -2, -3, -4, -5]
