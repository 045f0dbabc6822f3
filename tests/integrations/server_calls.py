"""Stand-ins for servers' modules."""

import importlib
import sys
from types import ModuleType

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
