"""Streams, events and threads of AMD's HIP runtime, and what a thousand launches leave behind."""

import ctypes
import threading
from pathlib import Path

import torch
from launches import Placed, recorded


def emptied(placed):
    """The bytes of the launch's cache, zero there and on the GPU, and those that the launch has written before."""
    cache = next(item.tensor for item in placed.items if item.access != "r").view(torch.uint8)
    expected = cache.clone()
    cache.zero_()
    placed.mirror.copy_in(placed.session.stream())
    return cache, expected


def test_launches_that_nobody_declared(session, placed):
    """Without a declaration a dispatch may touch what hipMalloc gave, and no more."""
    cache, expected = emptied(placed)
    before = session.gpu.dispatches
    placed.start()
    placed.finish()
    assert session.gpu.dispatches == before + 1
    assert session.gpu.reports[-1].findings == ()
    assert torch.equal(cache[expected != 0], expected[expected != 0])


def test_an_event_orders_two_streams(session, placed):
    """A launch on one stream, then an event that another stream waits for before it copies back."""
    runtime = session.runtime
    first, second, event = session.stream(), runtime.stream(), ctypes.c_void_p()
    runtime.call("hipEventCreate", ctypes.byref(event))
    cache, expected = emptied(placed)
    placed.start()
    runtime.call("hipEventRecord", event, ctypes.c_void_p(first))
    runtime.call("hipStreamWaitEvent", ctypes.c_void_p(second), event, 0)
    placed.mirror.copy_out(second)
    runtime.synchronize(second)
    runtime.call("hipEventSynchronize", event)
    assert expected.any()
    assert torch.equal(cache[expected != 0], expected[expected != 0])


def test_two_threads_launch_on_streams_of_their_own(session):
    launch = recorded(session)
    failures, counts = [], []

    def work():
        try:
            made = Placed(session, launch)
            for _ in range(20):
                made.start()
            made.finish()
            made.close()
            counts.append(session.stream())
        except Exception as error:
            failures.append(error)

    before = session.gpu.dispatches
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(set(counts)) == 2
    assert session.gpu.dispatches == before + 40


def resident() -> int:
    """Pages of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_a_thousand_launches_in_a_row_leave_nothing_behind(session, placed):
    def launches(count):
        for turn in range(count):
            placed.start()
            if turn % 50 == 49:
                placed.finish()
        placed.finish()

    launches(200)
    before = resident()
    launches(1000)
    grown = (resident() - before) * 4
    assert grown < 4096, f"{grown} KiB more"


def test_memory_that_is_given_back_can_be_had_again(session):
    launch = recorded(session)
    held = [address for address, _, _ in session.gpu.allocations()]
    for _ in range(50):
        Placed(session, launch).close()
    assert len(session.gpu.allocations()) <= len(held) + 4
