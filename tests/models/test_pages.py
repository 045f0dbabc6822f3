"""The page pool against a model of it: a dictionary from (sequence, position) to the value written there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_suite.models import PagedLatentCache
from mla_suite.models.cache import NO_SLOT, slots
from mla_suite.models.pages import PagePool


def small_cache(num_pages=8, page_size=4):
    return PagedLatentCache(2, num_pages, page_size, kv_format="fp32")


def write(cache, step, values):
    """Put each value into every element of its token's row, in every layer."""
    for layer in cache.layers:
        layer.view(-1, layer.shape[-1])[step.slot_mapping] = torch.tensor(values, dtype=torch.float32)[:, None]


def read(cache, sequence):
    """Returns the rows that the index tensors lead to, equal for both layers."""
    table, lens = cache.view([sequence])
    rows = [layer[table[0].long()].flatten(0, 1)[: lens.item(), 0].tolist() for layer in cache.layers]
    assert rows[0] == rows[1]
    return rows[0]


def test_a_step_says_where_tokens_go():
    cache = small_cache()
    a, b = cache.allocate(), cache.allocate()
    cache.append([a], [3])
    step = cache.append([a, b], [2, 5], width=3)
    assert step.seq_lens.tolist() == [5, 5]
    assert step.positions.tolist() == [3, 4, 0, 1, 2, 3, 4]
    assert (step.block_table.dtype, step.seq_lens.dtype) == (torch.int32, torch.int32)
    pages_a, pages_b = cache.pages(a), cache.pages(b)
    assert step.block_table.tolist() == [[*pages_a, 0], [*pages_b, 0]]
    expected = [pages_a[0] * 4 + 3, pages_a[1] * 4] + [pages_b[0] * 4 + i for i in range(4)] + [pages_b[1] * 4]
    assert step.slot_mapping.tolist() == expected


def test_a_fork_shares_pages_until_one_side_writes():
    """Writing both sides needs one page, not two: the last holder of a page keeps it."""
    cache = small_cache(num_pages=3)
    a = cache.allocate()
    write(cache, cache.append([a], [6]), [0, 1, 2, 3, 4, 5])
    b = cache.fork(a)
    assert cache.pages(b) == cache.pages(a)
    write(cache, cache.append([a, b], [1, 1]), [70, 60])
    assert cache.pages(b)[0] == cache.pages(a)[0]
    assert cache.pages(b)[1] != cache.pages(a)[1]
    assert (read(cache, a), read(cache, b)) == ([0, 1, 2, 3, 4, 5, 70], [0, 1, 2, 3, 4, 5, 60])


def test_reserved_pages_outlast_what_was_written_into_them():
    """A captured graph's block table names them. In a contiguous cache they are one page for each sequence."""
    cache, sequences = PagedLatentCache.contiguous(2, batch=3, max_len=4)
    assert cache.layers[0].shape == (3, 4, 576)
    cache.append(sequences, [4, 2, 3])
    for sequence in sequences:
        cache.truncate(sequence, 0)
    step = cache.append(sequences, [1, 1, 1])
    assert (step.block_table.tolist(), cache.free_pages) == ([[0], [1], [2]], 0)
    with pytest.raises(RuntimeError, match="append: needs 1 pages of 4 tokens, 0 of 3"):
        cache.append(sequences[1:2], [4])


def test_exhaustion_is_one_sentence_and_changes_nothing():
    cache = small_cache(num_pages=3)
    a, b = cache.allocate(), cache.allocate()
    write(cache, cache.append([a], [6]), list(range(6)))
    before = [layer.clone() for layer in cache.layers]
    with pytest.raises(RuntimeError, match=r"append: needs 2 pages of 4 tokens, 1 of 3 are free: free a sequence"):
        cache.append([b, a], [4, 3])
    with pytest.raises(RuntimeError, match="allocate: needs 2 pages"):
        cache.allocate(tokens=5)
    fork = cache.fork(a)
    cache.append([b], [1])
    with pytest.raises(RuntimeError, match="append: needs 1 pages"):
        cache.append([fork], [1])
    assert cache.length(fork) == 6
    assert cache.pages(fork) == cache.pages(a)
    assert all(torch.equal(x, y) for x, y in zip(before, cache.layers, strict=True))


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_a_cache_serves_inside_and_outside_of_inference_mode(first):
    with first():
        cache = small_cache(num_pages=2)
        cache.grow(1)
        a = cache.allocate()
        write(cache, cache.append([a], [2]), [1, 2])
    b = cache.fork(a)
    write(cache, cache.append([a], [1]), [3])  # copies a page
    with torch.inference_mode():
        write(cache, cache.append([b], [3]), [4, 5, 6])
    assert (read(cache, a), read(cache, b)) == ([1, 2, 3], [1, 2, 4, 5, 6])


def test_bookkeeping_is_on_the_host_whatever_the_default_device():
    cache = small_cache()
    a = cache.allocate()
    with torch.device("meta"):
        step = cache.append([a], [5])
        empty = cache.append([], [])
    assert {tensor.device.type for tensor in (*step, *empty)} == {"cpu"}
    assert step.positions.tolist() == [0, 1, 2, 3, 4]


def test_layers_are_separate_tensors_of_the_kv_formats_size():
    cache = PagedLatentCache(3, 2, 16, kv_format="v32")
    assert cache.bytes_per_token == 3 * 656
    assert len({layer.untyped_storage().data_ptr() for layer in cache.layers}) == 3
    assert PagedLatentCache(61, 1, 1).bytes_per_token == 61 * 1152


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "append", "append", "append", "fork", "free", "reserve", "truncate"]),
        st.integers(0, 30),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.sampled_from([1, 3, 4]))
def test_any_history_reads_back_what_was_written(actions, page_size):
    cache = small_cache(num_pages=9, page_size=page_size)
    written: dict[int, list[float]] = {}
    reserved: dict[int, int] = {}  # tokens
    clock = 0.0
    for action, number in actions:
        handle = sorted(written)[number % len(written)] if written else None
        try:
            if action == "allocate":
                own = cache.allocate(number % 7)
                written[own], reserved[own] = [], number % 7
            elif handle is None:
                continue
            elif action == "append":
                several = sorted({handle, *sorted(written)[:2]})
                counts = [number % 5 + i for i in range(len(several))]
                step = cache.append(several, counts)
                values = [clock + i for i in range(sum(counts))]
                clock += sum(counts)
                write(cache, step, values)
                for sequence, count in zip(several, counts, strict=True):
                    written[sequence] += values[:count]
                    values = values[count:]
            elif action == "fork":
                own = cache.fork(handle)
                written[own], reserved[own] = list(written[handle]), 0
            elif action == "reserve":
                cache.reserve(handle, number)
                reserved[handle] = max(reserved[handle], number)
            elif action == "free":
                cache.free(handle)
                del written[handle]
                with pytest.raises(ValueError, match=f"sequence {handle} is not in this cache"):
                    cache.length(handle)
            else:
                written[handle] = written[handle][: number % (len(written[handle]) + 1)]
                cache.truncate(handle, len(written[handle]))
        except RuntimeError:
            pass  # exhausted: the checks below show that nothing moved
        for sequence, values in written.items():
            assert read(cache, sequence) == values
            assert len(cache.pages(sequence)) <= -(-max(len(values), reserved[sequence]) // page_size)
        held = {page for sequence in written for page in cache.pages(sequence)}
        assert cache.free_pages == 9 - len(held)
        for page in held:
            assert cache.users(page) == sum(page in cache.pages(sequence) for sequence in written)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda cache, own: cache.append([own, own], [1, 1]), "a sequence is named twice"),
        (lambda cache, own: cache.append([own], [1, 1]), "1 sequences and 2 counts"),
        (lambda cache, own: cache.append([own, own], [1], width=4), "2 sequences and 1 counts"),
        (lambda cache, own: cache.append([own], [-1]), "a count is 0 or more"),
        (lambda cache, own: cache.append([own], [5], width=1), "width 1: sequence 0 needs 2 pages"),
        (lambda cache, own: cache.truncate(own, 4), "truncate: length 4 of a sequence of 3"),
        (lambda cache, own: cache.reserve(own, -1), "reserve: -1 tokens; reserve 0 or more"),
        (lambda cache, own: cache.free(own + 1), "sequence 1 is not in this cache"),
        (lambda cache, own: cache.fork(own + 1), "sequence 1 is not in this cache"),
        (lambda cache, own: cache.length(own + 1), "sequence 1 is not in this cache"),
        (lambda cache, own: PagedLatentCache(1, 1, 1, kv_format="dsv4"), "kv_format 'dsv4' holds rows of 512 values"),
        (lambda cache, own: PagePool(0, 4), "0 pages of 4 tokens; both must be 1 or more"),
        (lambda cache, own: PagedLatentCache(1.5, 8, 4), "PagedLatentCache: num_layers is 1.5; it takes an int"),
        (lambda cache, own: PagedLatentCache(2, "8", 4), "PagedLatentCache: num_pages is '8'; it takes an int"),
        (lambda cache, own: PagedLatentCache(2, 8, 4.0), "PagedLatentCache: page_size is 4.0; it takes an int"),
        (lambda cache, own: cache.append([own], [1.5]), r"append: counts\[0\] is 1.5; it takes an int"),
        (lambda cache, own: cache.append([own], [1], width=1.5), "block table: width is 1.5; it takes an int"),
        (lambda cache, own: cache.truncate(own, 0.5), "truncate: length is 0.5; it takes an int"),
        (lambda cache, own: cache.reserve(own, 9.5), "reserve: tokens is 9.5; it takes an int"),
        (lambda cache, own: cache.allocate("9"), "allocate: tokens is '9'; it takes an int"),
        (lambda cache, own: cache.grow(1.5), "grow: num_pages is 1.5; it takes an int"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(call, sentence):
    cache = small_cache()
    own = cache.allocate()
    cache.append([own], [3])
    with pytest.raises(TypeError if "it takes an int" in sentence else ValueError, match=sentence):
        call(cache, own)
    assert (cache.length(own), cache.pages(own), cache.free_pages) == (3, (0,), 7)


def test_counts_may_be_a_tensor():
    cache = small_cache()
    own = cache.allocate()
    counts = torch.tensor([3])
    cache.append([own], counts)
    counts += 1
    assert cache.append([own], counts).seq_lens.tolist() == [7]
    assert type(cache.length(own)) is int


@pytest.mark.parametrize("position", [-1, 8, 2**31])
def test_a_position_outside_of_the_table_has_no_slot(position):
    positions = torch.tensor([[position, 5]])
    assert slots(torch.tensor([[3, 2]]), positions, 4).tolist() == [[NO_SLOT, 9]]
