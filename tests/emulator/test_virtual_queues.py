"""The virtual GPU's queues without AMD's runtime: packets, signals, barriers, events and the copy engine's commands."""

import operator
import time

import pytest
from model_queues import (
    AQL,
    DATA,
    LIMIT_S,
    PM4,
    READ,
    RING_BYTES,
    SDMA,
    VRAM,
    Host,
    barrier,
    barrier_value,
    dispatch,
    halves,
    pm4,
)

from mla_suite.emulator import core
from mla_suite.launch.driver import DriverError

INVALID, ALL, ANY = 1, 3, 5
INDIRECT_BUFFER, ACQUIRE_MEM, WRITE_DATA = 0x3F, 0x58, 0x37
NOP, COPY, FENCE, TRAP, POLL, ATOMIC, FILL, TIMESTAMP = 0, 1, 5, 6, 8, 10, 11, 13
A_MOMENT_S = 0.02


@pytest.fixture
def host(tmp_path):
    try:
        core.load()
    except DriverError as error:
        pytest.skip(str(error))
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.fixture
def aql(host):
    host.open(AQL)
    return host


@pytest.fixture
def sdma(host):
    host.open(SDMA)
    return host


def still(host, signal, value=1):
    """Whether a packet does not complete for a moment."""
    time.sleep(A_MOMENT_S)
    return host.value(signal) == value


def test_a_dispatch_reaches_the_front_as_it_was_written(aql):
    done = aql.signal(0, 1, event=7, mailbox=0x3000)
    aql.send(dispatch(0x123456789A, 0x9876543210, (512, 3, 2), (256, 1, 1), done))
    aql.drain()
    (said,) = aql.dispatches
    assert (said.kernel_object, said.kernarg, said.packet) == (0x123456789A, 0x9876543210, 0x10000)
    assert (tuple(said.grid), tuple(said.block)) == ((512, 3, 2), (256, 1, 1))
    assert (said.scratch_bytes, said.lds_bytes) == (64, 256)
    assert aql.value(done) == 0
    assert 0 < aql.read(done + 32) <= aql.read(done + 40), "the signal has the times of begin and end"
    assert aql.read(0x3000) == 7, "the mailbox holds the event's number"
    assert 7 in aql.events
    assert aql.read(0x10000, "H") == INVALID, "the slot is the host's again"
    assert aql.faults == []


def test_more_packets_than_the_ring_has_slots(aql):
    done = aql.signal(0, 200)
    for number in range(200):
        aql.until("freed a slot", lambda: aql.written - aql.read(READ, "Q") < RING_BYTES // 64)
        aql.send(dispatch(number, 0, (64, 1, 1), (64, 1, 1), done))
    aql.drain()
    assert aql.value(done) == 0
    assert [said.kernel_object for said in aql.dispatches] == list(range(200))


@pytest.mark.parametrize(("kind", "count", "ended"), [(ALL, 5, range(5)), (ANY, 5, [3]), (ALL, 0, []), (ANY, 0, [])])
def test_a_barrier_waits_for_its_signals(aql, kind, count, ended):
    waited, done = [aql.signal(i, 1) for i in range(1, 1 + count)], aql.signal(0, 1)
    aql.send(barrier(kind, waited, done))
    for number in ended:
        assert still(aql, done)
        aql.write(waited[number] + 8, "q", 0)
    aql.drain()
    assert aql.value(done) == 0


@pytest.mark.parametrize(
    ("condition", "compare"), [(0, operator.eq), (1, operator.ne), (2, operator.lt), (3, operator.ge)]
)
def test_a_barrier_on_a_value(aql, condition, compare):
    """The middle digit of the signal's value is compared with 5."""
    waits, ends = ([digit for digit in (4, 5, 6) if compare(digit, 5) is met] for met in (False, True))
    waited, done = aql.signal(1, 0x309 | waits[0] << 4), aql.signal(0, 1)
    aql.send(barrier_value(waited, 0x50, 0xF0, condition, done))
    assert still(aql, done)
    aql.write(waited + 8, "q", 0x309 | ends[0] << 4)
    aql.drain()
    assert aql.value(done) == 0


def test_a_queue_that_is_destroyed_while_it_waits(aql):
    done = aql.signal(0, 1)
    aql.send(barrier(ALL, [aql.signal(1, 1)], done))
    assert still(aql, done)
    began = time.monotonic()
    aql.close()
    assert time.monotonic() - began < 5
    assert aql.value(done) == 1, "a packet that never ran does not complete"


def test_cache_maintenance_and_other_commands_of_the_front_end(aql):
    aql.table.allocated(aql.gpu, PM4, 0x1000, VRAM)
    aql.write(PM4, "I" * 8, 3 << 30 | ACQUIRE_MEM << 8 | 6 << 16, *[0] * 7)
    aql.send(pm4(INDIRECT_BUFFER << 8, PM4, 8, aql.signal(0, 1)))
    aql.drain()
    assert aql.faults == []
    aql.write(PM4, "I", 3 << 30 | WRITE_DATA << 8 | 6 << 16)
    aql.send(pm4(INDIRECT_BUFFER << 8, PM4, 8, aql.signal(1, 1)))
    aql.send(pm4(INDIRECT_BUFFER << 8, DATA + 0x1000, 8, aql.signal(2, 1)))
    aql.drain()
    assert aql.faults == [
        "PM4 command 0x37 is not modelled; cache maintenance is",
        "a queue holds a PM4 packet that is no jump to a buffer in GPU memory",
    ]
    assert [aql.value(aql_signal) for aql_signal in (0x2000, 0x2040, 0x2080)] == [0, 0, 0], "nobody waits for ever"


def test_packets_that_are_not_modelled(aql):
    done = aql.signal(0, 2)
    aql.send(barrier(4, [], done))
    aql.send(bytes([0, 0, 9, 0]).ljust(56, b"\0") + done.to_bytes(8, "little"))
    aql.drain()
    assert aql.faults == [
        "a queue holds a packet of type 4, format 0, which is not modelled",
        "a queue holds a packet of type 0, format 9, which is not modelled",
    ]
    assert aql.value(done) == 0


def test_the_end_of_a_process_skips_what_is_queued_and_leaves_the_queues_empty(aql):
    done = aql.signal(0, 60)
    for _ in range(40):
        aql.send(dispatch(1, 0, (64, 1, 1), (64, 1, 1), done))
    aql.drain()
    assert aql.library.virtual_gpu_end(0) == 0
    for _ in range(20):
        aql.send(dispatch(1, 0, (64, 1, 1), (64, 1, 1), done))
    assert aql.library.virtual_gpu_end(LIMIT_S * 1000) == 20
    assert (len(aql.dispatches), aql.value(done), aql.read(READ, "Q"), aql.faults) == (40, 0, 60, [])


def test_the_end_of_a_process_waits_no_longer_than_its_limit(aql):
    host = aql.signal(0, 1)
    aql.send(barrier(3, [host], aql.signal(1, 1)))
    aql.send(dispatch(1, 0, (64, 1, 1), (64, 1, 1), 0))
    assert aql.library.virtual_gpu_end(20) == 0
    aql.write(host + 8, "q", 0)
    assert aql.library.virtual_gpu_end(LIMIT_S * 1000) == 1


def test_a_spare_queue_takes_no_packets_and_can_be_destroyed(aql):
    aql.library.virtual_gpu_spare_queue()
    done = aql.signal(0, 1)
    aql.send(dispatch(1, 0, (64, 1, 1), (64, 1, 1), done))
    assert still(aql, done)
    assert aql.dispatches == []


def test_a_wake_up_that_was_missed_is_repeated(aql):
    """By the event that nobody destroys; setting it makes every sleeper look again."""
    aql.library.virtual_gpu_spare_event(99)
    aql.send(dispatch(1, 0, (64, 1, 1), (64, 1, 1), aql.signal(0, 1, event=7)))
    aql.drain()
    aql.until("repeated the wake-up", lambda: aql.events.count(99) >= 2)
    assert aql.events.count(7) == 1


def test_the_copy_engine_copies_fills_counts_and_tells_the_time(sdma):
    sdma.memory[DATA : DATA + 8] = b"abcdefgh"
    sdma.write(DATA + 0x100, "q", 40)
    sdma.command(NOP | 2 << 16, 0xDEAD, 0xBEEF)
    sdma.command(COPY, 6, 0, *halves(DATA), *halves(DATA + 0x40))
    sdma.command(FILL, *halves(DATA + 0x81), 0x04030201, 5)
    sdma.command(ATOMIC | 47 << 25, *halves(DATA + 0x100), 2, 0, 0, 0, 0)
    sdma.command(TIMESTAMP | 2 << 8, *halves(DATA + 0x108))
    sdma.command(FENCE, *halves(DATA + 0x110), 5)
    sdma.command(TRAP, 11)
    sdma.drain()
    assert bytes(sdma.memory[DATA + 0x40 : DATA + 0x48]) == b"abcdefg\0", "seven bytes, and none more"
    assert bytes(sdma.memory[DATA + 0x80 : DATA + 0x88]) == bytes([0, 1, 2, 3, 4, 1, 2, 0])
    assert sdma.read(DATA + 0x100) == 42
    assert sdma.read(DATA + 0x108) > 0
    assert sdma.read(DATA + 0x110, "I") == 5
    assert 11 in sdma.events
    assert sdma.faults == []


@pytest.mark.parametrize(
    ("how", "compare"),
    list(enumerate((operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt), start=1)),
)
def test_the_copy_engine_polls_memory(sdma, how, compare):
    """The low digit of the word is compared with 5."""
    waits, ends = ([digit for digit in (4, 5, 6) if compare(digit, 5) is met] for met in (False, True))
    sdma.write(DATA, "I", 0xF0 | waits[0])
    sdma.command(POLL | how << 28 | 1 << 31, *halves(DATA), 5, 0xF, 0)
    sdma.command(FENCE, *halves(DATA + 8), 1)
    time.sleep(A_MOMENT_S)
    assert sdma.read(DATA + 8, "I") == 0
    sdma.write(DATA, "I", 0xF0 | ends[0])
    sdma.drain()
    assert sdma.read(DATA + 8, "I") == 1


def test_a_command_may_cross_the_end_of_the_ring(sdma):
    sdma.command(NOP | (RING_BYTES // 4 - 4) << 16, *[0] * (RING_BYTES // 4 - 4))
    sdma.drain()
    sdma.memory[DATA : DATA + 4] = b"wrap"
    sdma.command(COPY, 3, 0, *halves(DATA), *halves(DATA + 0x40))
    sdma.drain()
    assert bytes(sdma.memory[DATA + 0x40 : DATA + 0x44]) == b"wrap"


def test_what_the_copy_engine_does_not_do_is_said(sdma):
    sdma.command(COPY, 3, 0, *halves(DATA + 0xFFE), *halves(DATA))
    sdma.drain()
    sdma.command(COPY | 4 << 8, 3, 0, *halves(DATA), *halves(DATA))
    sdma.drain()
    sdma.command(FENCE, *halves(DATA + 8), 1)
    sdma.drain()
    assert sdma.faults == [
        "the copy engine's read of 4 bytes at 0x40ffe lies in no allocation",
        "the copy engine's command 1.4 is not modelled",
    ]
    assert sdma.read(DATA + 8, "I") == 1, "the queue goes on"
    sdma.table.freed(sdma.gpu, DATA, 0x1000)
    sdma.command(FENCE, *halves(DATA + 8), 2)
    sdma.drain()
    assert sdma.faults[-1] == "the copy engine's fence of 4 bytes at 0x40008 lies in no allocation"
    assert sdma.read(DATA + 8, "I") == 1
