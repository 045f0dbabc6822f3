"""Fixtures that several files of this folder use."""

from functools import partial

import pytest

import mla_suite


@pytest.fixture
def decodes(monkeypatch):
    """The calls that reached our decode and our sparse_decode, by name."""
    calls = []

    def counted(name, own, *args, **kwargs):
        calls.append(name)
        return own(*args, **kwargs)

    for name in ("decode", "sparse_decode"):
        monkeypatch.setattr(mla_suite, name, partial(counted, name, getattr(mla_suite, name)))
    return calls
