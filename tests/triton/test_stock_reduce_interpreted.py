"""The restated stock reduction of benchmarks/bench_reduce.py gives AITER's meaning of its maps, interpreted."""

import bench_reduce
import pytest
import torch

from mla_suite.integrations import aiter

CPU = torch.device("cpu")


@pytest.mark.parametrize("maps", [bench_reduce.uniform_maps(3, 4, CPU), bench_reduce.planned_maps(3, 16, 32, 8, CPU)])
def test_a_plan_is_reduced_as_aiter_does(maps: bench_reduce.Maps) -> None:
    tokens = maps.indptr.shape[0] - 1
    turn = bench_reduce.turn_of(maps.rows, tokens, 2, CPU)
    turn = turn._replace(out=turn.out.float())
    turn.partial_lse[maps.partial[maps.indptr[0]].item(), 1] = -torch.inf
    own = turn._replace(out=turn.out.clone(), lse=turn.lse.clone())
    assert maps.tiles > 0
    bench_reduce.run_stock(own, maps, units=1)
    aiter.mla_reduce_v1(*turn[:2], maps.indptr, maps.final, maps.partial, 1, 0, *turn[2:])
    torch.testing.assert_close(own.out, turn.out, atol=2e-6, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(own.lse, turn.lse, atol=2e-6, rtol=1e-6, equal_nan=True)
    bench_reduce.check(own, maps)
    untouched = maps.indptr.diff() <= 1
    assert own.out[untouched].isnan().all(), "a tile with one partial or none is left as it was"
