"""Stand-ins for servers' modules, a batch in pages and what attention over it gives, for tests of server backends."""

import importlib
import sys
from types import ModuleType

import torch

HEADS, LATENT, WIDTH = 8, 512, 576


def modules(monkeypatch, **contents):
    """Put modules (dots as __) into sys.modules, with their parents."""
    for name, content in contents.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        for key, value in content.items():
            setattr(sys.modules[".".join(parts)], key, value)


def fresh(monkeypatch, name):
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


def attend(q, keys, scale):
    scores = q.float() @ keys.float().T * scale
    return torch.softmax(scores, -1) @ keys[:, :LATENT].float(), scores.logsumexp(-1)


def paged(lengths, page, dtype=torch.bfloat16):
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 1).int()
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    cache = torch.randn(len(order), page, WIDTH).to(dtype)
    first = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[first : first + count]
        first += count
    return cache, table


def expected(q, cache, table, lengths, scale):
    """q [batch, q_len, heads, 576], causal."""
    outs, lses = [], []
    for b, length in enumerate(lengths):
        keys = cache[table[b].long()].flatten(0, 1)[:length]
        for i in range(q.shape[1]):
            out, lse = attend(q[b, i], keys[: length - q.shape[1] + 1 + i], scale)
            outs.append(out)
            lses.append(lse)
    return torch.stack(outs), torch.stack(lses)
