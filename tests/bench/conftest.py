"""Fixtures that several files of this folder use."""

import os
from pathlib import Path

import pytest
import vllm_turns


@pytest.fixture
def turn_engine(monkeypatch):
    """The program that stands for an engine, which finds the module that it takes turns by."""
    monkeypatch.setenv("PYTHONPATH", str(Path(vllm_turns.__file__).parent), prepend=os.pathsep)
    return str(Path(__file__).with_name("turn_engine.py"))
