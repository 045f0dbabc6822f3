"""The number that pytest-benchmark stores and compares: a measurement in place of the time that taking it took.

pytest-benchmark calls a timer before and after the function and keeps the difference. `meter` is such a timer: it
stands still but for what is added to it, be it seconds on a device or clocks from a counter.

    @pytest.mark.benchmark(timer=meter)
    def test_device_time(benchmark):
        benchmark.pedantic(lambda: add(seconds_on_the_device()), rounds=8)
"""

from __future__ import annotations

_total = 0.0


def meter() -> float:
    """The sum of all that was added."""
    return _total


def add(amount: float) -> None:
    """Have the function that is being benchmarked take `amount`, which is not negative."""
    global _total
    if amount < 0:
        raise ValueError(f"meter: {amount} is added; a measurement is 0 or more")
    _total += amount


def reset() -> None:
    """Begin at 0 again, before each benchmark: so a difference is exactly what was added once."""
    global _total
    _total = 0.0
