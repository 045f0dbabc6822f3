"""A timer that the benchmark sets, so that pytest-benchmark stores a measured number instead of the time that passed.

The number may be seconds on a device or clocks from a counter.

    @pytest.mark.benchmark(timer=meter.meter)
    def test_device_time(benchmark):
        benchmark.pedantic(lambda: meter.add(seconds_on_the_device()), setup=meter.reset, rounds=8)
"""

_metered = 0.0


def meter() -> float:
    """The sum of all that was added since `reset`."""
    return _metered


def add(amount: float) -> None:
    """Have the function that is being benchmarked take `amount`, which is not negative."""
    global _metered
    if amount < 0:
        raise ValueError(f"meter: {amount} is added; a measurement is 0 or more")
    _metered += amount


def reset() -> None:
    """Begin at 0 again, before each benchmark: so a difference is exactly what was added once."""
    global _metered
    _metered = 0.0
