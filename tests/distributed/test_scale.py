"""benchmarks/scale_model.py, the model of docs/scale.md; test_figures.py compares its errors with that page."""

from dataclasses import replace

import pytest
import scale_model as model
from scale_model import H200, NCCL, PEER_MEMORY, Row, sent


def test_terms_of_a_fit_are_costs():
    """No latency, rate or fixed cost is negative, and decode reaches less than the whole matrix rate."""
    for line in (*PEER_MEMORY.values(), *NCCL.values()):
        assert min(line.two_ranks, line.further_rank, line.per_byte) > 0
        assert 1 / line.per_byte < model.NVLINK
    assert [kind for kind, line in PEER_MEMORY.items() if line.second_exchange > 0] == ["sum"]
    assert H200.layer > H200.decode > 0
    assert 0 < H200.reached < 1


def test_a_fit_finds_the_factors_it_was_made_with():
    terms = [[1.0, 2.0], [1.0, 5.0], [1.0, 11.0], [0.0, 3.0]]
    took = [7.0 + 3.0 * a + 0.5 * b for a, b in terms]
    assert model.fitted(terms, took, [7.0] * 4) == pytest.approx([3.0, 0.5])


def test_a_row_is_read_by_its_words():
    assert Row.read({"what": "layer B128 kv 512", "split": "TP2 x CP2", "many_us": "9"}, 4)[:4] == (
        "layer",
        (128, 512),
        {"tp": 2, "cp": 2},
        {"many_us": 9.0},
    )
    assert Row.read({"what": "decode B1 H128 q_len 4 kv 262144"}, 2)[1:3] == ((4, 262_144), {"cp": 2})
    assert Row.read({"what": "gather 32 x 128 x 576 bf16", "split": ""}, 4)[1:3] == ((32,), {})


def test_a_layer_that_is_split_in_both_ways_exchanges_in_groups():
    both = model.layer(H200, 128, 4096, tp=2, cp=2)
    weights = (model.DOWN_BYTES + model.HEAD_BYTES / 4) / H200.memory
    exchanged = H200.collective("sum", 128, 4) + H200.collective("gather", 64, 2) + H200.collective("merge", 64, 2)
    assert both == pytest.approx(H200.layer + weights + H200.attention(128, 64, 2048, 128) + exchanged)


def test_a_collective_costs_what_its_way_sends():
    line = PEER_MEMORY["sum"]
    waits = line.two_ranks + 6 * line.further_rank
    # Through peer memory each of 7 others gets the whole summand of 2 x 7168 bytes.
    assert H200.collective("sum", 1, 8) == pytest.approx(waits + 7 * 14336 * line.per_byte)
    # 128 tokens are summed in two exchanges, in which a rank sends its part of the sum to 7 others, and theirs to them.
    in_two = 128 * 14336 * 2 * 7 / 8 * line.per_byte + line.second_exchange
    assert H200.collective("sum", 128, 8) == pytest.approx(waits + in_two)
    # 1,400 tokens do not fit the 18 MB that eight ranks share.
    nccl = NCCL["sum"]
    whole = 1400 * 14336 * nccl.per_byte
    assert H200.collective("sum", 1400, 8) == pytest.approx(nccl.two_ranks + 6 * nccl.further_rank + whole)
    assert sent("gather", 4, 8, "nccl") == sent("gather", 4, 8, "one") == 4 * 147_456 * 7 / 8
    assert H200.collective("sum", 1, 16) == pytest.approx(20e-6 + 14336 * 2 * 15 / 16 / 50e9)
    slower = replace(H200, link_to_peer=H200.link / 4)
    assert slower.collective("merge", 128, 2) > 3 * H200.collective("merge", 128, 2)
    assert slower.collective("merge", 128, 8) == H200.collective("merge", 128, 8)
