"""Which sequence owns which page: reference counts, forks and the free list, without a tensor in sight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from mla_suite.core import checks


@dataclasses.dataclass
class PagedSequence:
    """One sequence: its pages in order (pages reserved ahead included), the number of tokens written, and the number of
    pages it holds however few they are."""

    pages: list[int]
    length: int = 0
    reserved: int = 0


class Copy(NamedTuple):
    """The bytes of page `source` belong into page `target` before anything is appended there."""

    source: int
    target: int


class PagePool:
    """Reference-counted pages. Every call either succeeds or raises and leaves the pool as it was.

    A sequence is known by the integer that `allocate` or `fork` returned. A page is shared after `fork` and is free
    again when the last of its sequences lets go of it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        num_pages = checks.as_int(type(self).__name__, "num_pages", num_pages)
        page_size = checks.as_int(type(self).__name__, "page_size", page_size)
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{type(self).__name__}: {num_pages} pages of {page_size} tokens; both must be 1 or more")
        self.num_pages = num_pages
        self.page_size = page_size
        self._users = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._sequences: dict[int, PagedSequence] = {}
        self._next_handle = 0

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    def pages(self, handle: int) -> tuple[int, ...]:
        """Pages of a sequence in order, reserved ones included."""
        return tuple(self._sequence(handle).pages)

    def length(self, handle: int) -> int:
        """Tokens of a sequence."""
        return self._sequence(handle).length

    def users(self, page: int) -> int:
        """How many sequences hold this page."""
        return self._users[page]

    def allocate(self, tokens: int = 0) -> int:
        """A new empty sequence with pages reserved for `tokens` tokens."""
        tokens = checks.as_int("allocate", "tokens", tokens)
        if tokens < 0:
            raise ValueError(f"allocate: {tokens} tokens; reserve 0 or more")
        reserved = self._pages_for(tokens)
        self._require(reserved, "allocate")
        return self._adopt(PagedSequence([self._take() for _ in range(reserved)], reserved=reserved))

    def reserve(self, handle: int, tokens: int) -> None:
        """Hold pages for `tokens` tokens of this sequence in all, written ones included."""
        sequence, tokens = self._sequence(handle), checks.as_int("reserve", "tokens", tokens)
        if tokens < 0:
            raise ValueError(f"reserve: {tokens} tokens; reserve 0 or more")
        needed = max(self._pages_for(tokens) - len(sequence.pages), 0)
        self._require(needed, "reserve")
        sequence.pages.extend(self._take() for _ in range(needed))
        sequence.reserved = max(sequence.reserved, self._pages_for(tokens))

    def _add_pages(self, count: int) -> None:
        """Enlarge the pool by `count` free pages, numbered after the present ones."""
        self._free[:0] = range(self.num_pages + count - 1, self.num_pages - 1, -1)
        self._users.extend([0] * count)
        self.num_pages += count

    def fork(self, handle: int) -> int:
        """A second sequence with the same tokens: it shares every written page; the first append to a partly filled
        shared page copies that page."""
        parent = self._sequence(handle)
        shared = parent.pages[: self._pages_for(parent.length)]
        for page in shared:
            self._users[page] += 1
        return self._adopt(PagedSequence(list(shared), parent.length))

    def free(self, handle: int) -> None:
        """Forget the sequence; its pages return to the pool when no fork holds them."""
        for page in self._sequence(handle).pages:
            self._release(page)
        del self._sequences[handle]

    def truncate(self, handle: int, length: int) -> None:
        """Forget the tokens from `length` on, as after a rejected speculation, and the pages that held only those.
        Reserved pages stay the sequence's, but for those that a fork reads."""
        sequence, length = self._sequence(handle), checks.as_int("truncate", "length", length)
        if not 0 <= length <= sequence.length:
            raise ValueError(
                f"truncate: length {length} of a sequence of {sequence.length}; give 0 to {sequence.length}"
            )
        written = self._pages_for(length)
        kept = sequence.pages[:written]
        for position, page in enumerate(sequence.pages[written:], written):
            if position < sequence.reserved and self._users[page] == 1:
                kept.append(page)
            else:
                self._release(page)
        sequence.pages, sequence.length = kept, length

    def _extend(self, handles: Sequence[int], counts: Sequence[int]) -> list[Copy]:
        """Lengthen each sequence by its count of tokens; returns the page copies to make before writing them."""
        if len(handles) != len(counts):
            raise ValueError(f"append: {len(handles)} sequences and {len(counts)} counts; give one count per sequence")
        if len(set(handles)) != len(handles):
            raise ValueError("append: a sequence is named twice; give its tokens as one count")
        if any(count < 0 for count in counts):
            raise ValueError(f"append: counts {list(counts)}; a count is 0 or more (use truncate to drop tokens)")
        self._require(self._pages_to_extend(handles, counts), "append")
        copies: list[Copy] = []
        for handle, count in zip(handles, counts, strict=True):
            copies.extend(self._extend_one(self._sequence(handle), count))
        return copies

    def _extend_one(self, sequence: PagedSequence, count: int) -> list[Copy]:
        copies = []
        filled = sequence.length % self.page_size
        last = sequence.length // self.page_size
        if count and filled and self._users[sequence.pages[last]] > 1:
            copies.append(Copy(sequence.pages[last], self._take()))
            self._release(sequence.pages[last])
            sequence.pages[last] = copies[0].target
        sequence.length += count
        while len(sequence.pages) < self._pages_for(sequence.length):
            sequence.pages.append(self._take())
        return copies

    def _pages_to_extend(self, handles: Sequence[int], counts: Sequence[int]) -> int:
        needed = 0
        leaving: dict[int, int] = {}
        for handle, count in zip(handles, counts, strict=True):
            sequence = self._sequence(handle)
            needed += max(self._pages_for(sequence.length + count) - len(sequence.pages), 0)
            if count and sequence.length % self.page_size:
                page = sequence.pages[sequence.length // self.page_size]
                # The last holder of a shared page keeps it, so only the others need a copy.
                if self._users[page] - leaving.get(page, 0) > 1:
                    leaving[page] = leaving.get(page, 0) + 1
                    needed += 1
        return needed

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _sequence(self, handle: int) -> PagedSequence:
        if handle not in self._sequences:
            raise ValueError(
                f"sequence {handle} is not in this cache; use a number from allocate or fork that is not freed"
            )
        return self._sequences[handle]

    def _require(self, needed: int, call: str) -> None:
        if needed > len(self._free):
            raise RuntimeError(
                f"{call}: needs {needed} pages of {self.page_size} tokens, {len(self._free)} of {self.num_pages} are "
                "free: free a sequence or build the cache with more pages"
            )

    def _adopt(self, sequence: PagedSequence) -> int:
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._sequences[handle] = sequence
        return handle

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)
