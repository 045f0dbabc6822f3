"""Measuring on a real GPU: floors, cold caches, and verdicts about kernels of known length."""

from __future__ import annotations

import pytest
import torch
from saved_figures import saved

from mla_suite.__main__ import main
from mla_suite.bench import floors, sets, timer
from mla_suite.bench.measure import measure
from mla_suite.bench.timer import Effort
from mla_suite.core import register

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: there is no device time to measure")
SHORT = Effort(rounds=3, rest_s=0.02)


@pytest.fixture(scope="module")
def ceilings():
    return floors.measure(torch.device("cuda"), Effort(rounds=1, rest_s=0.05))


def test_ceilings_are_plausible(ceilings):
    times = [us for _, us in ceilings.read]
    assert times == sorted(times)
    large = torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_()
    copied = torch.empty_like(large)
    us = timer.median(timer.device_rounds(lambda turn: copied.copy_(turn), [large], SHORT))
    assert ceilings.gb_per_s > 0.9 * 2 * large.numel() * 4 / us / 1e3  # reading is at least as fast as copying
    assert ceilings.tflops > 10


def test_rotating_inputs_are_cold():
    """The same lines again and again come from the cache: a load that waits for the one before takes half as long.

    Bandwidth would not show it: an H200 reads 8 MiB in 3.9 us cold, half of which is the launch.
    """
    from chase_kernel import HOPS, WORDS, chains, chase

    place, count = torch.device("cuda"), 2048  # 8 MiB in flights of 256 KiB: far from what the memory can deliver
    pieces = [chains(count, place) for _ in range(-(-timer.cold_bytes(place) // (4 * WORDS * HOPS * count)))]
    found = torch.empty(count, dtype=torch.int32, device=place)

    def follow(lines: torch.Tensor) -> None:
        chase(lines, found)

    cold = timer.median(timer.device_rounds(follow, pieces, SHORT))
    warm = timer.median(timer.device_rounds(follow, pieces[:1], SHORT))
    assert torch.equal(found, -1 - torch.arange(count, dtype=torch.int32, device=place))
    assert warm * 1.3 < cold


def sleeping(cycles: int) -> list[float]:
    rounds = []
    for _ in range(2):
        rounds += timer.device_rounds(lambda turn: torch.cuda._sleep(cycles), [0, 1], SHORT)
    return rounds


def test_ten_percent_is_found_and_nothing_else():
    for _ in range(10):
        old, same, slow = sleeping(80_000), sleeping(80_000), sleeping(88_000)
        assert timer.median(old) > 20
        assert timer.judge(old, same).word == "same"
        assert timer.judge(old, slow).word == "slower"


@pytest.mark.parametrize("op", ["decode", "combine"])
def test_own_backends_are_right_timed_and_no_faster_than_the_floor(op, ceilings):
    case = {"decode": sets.decode(8, 16, 4096, planned=True), "combine": sets.combine(64, 16, 8)}[op]
    results = list(measure(case, torch.device("cuda"), SHORT, floors=ceilings))
    assert {result.backend for result in results} <= {backend.name for backend in register.get(op).backends}
    timed = [result for result in results if result.rounds]
    assert timed, [result.failure for result in results]
    for result in results:
        assert not result.wrong, result.failure
    for result in timed:
        assert result.us / result.floor_us > 0.95
        assert result.host_us > 0


def test_the_command_writes_its_rows_and_ceilings(tmp_path):
    path = tmp_path / "rows.csv"
    assert main(["bench", "--set", "aiter-3468", "--shapes", "b64-", "--backend", "triton", "--csv", str(path)]) == 0
    assert "# ceilings: read " in path.read_text()
    rows = saved(path)
    assert len(rows) == 4
    for row in rows:
        assert float(row["us"]) > 0
        assert float(row["sustained_us"]) > 0
        assert float(row["over_floor"]) > 0
