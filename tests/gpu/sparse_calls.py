"""Calls of sparse_decode on a real GPU that our own kernels answer, and their check against fp64."""

from __future__ import annotations

import re

import pytest
import sparse_runs
import torch
from gpu_problems import moved
from sparse_problems import problem

import mla_suite
from mla_suite.core import dispatch
from mla_suite.ops.sparse_decode import SPARSE_DECODE

CUDA = torch.device("cuda")


def skip_without_kernels():
    """Skips with dispatch's reasons unless a small call has a native kernel."""
    args, kwargs = problem([("v32", 1, 64, 8)], 1, 16)
    choice = chosen(moved(args, CUDA), kwargs)
    if choice.backend.name != "native":
        pytest.skip(str(choice))


def chosen(args, kwargs):
    facts = SPARSE_DECODE.problem(*args, **kwargs)
    return dispatch.choose("sparse_decode", SPARSE_DECODE.backends, facts, dispatch.arch_of(args[0]), "cuda")


def native(args, kwargs):
    """The call's instance; anything but our own kernel fails."""
    choice = chosen(args, kwargs)
    assert choice.backend.name == "native", str(choice)
    explained = str(mla_suite.explain("sparse_decode", *args, **kwargs))
    assert "native" in explained
    in_its_place = re.search(r"swap_ab_sparse_decode_[\w-]+|sparse_decode_[\w-]+reduce[\w-]*", explained)
    return in_its_place[0] if in_its_place else choice.supported.config.instance


def attend(args, kwargs):
    """Runs the native kernels and nothing else; arguments on the CPU, results too."""
    there = moved(args, CUDA)
    native(there, kwargs)
    out, lse = torch.ops.mla_suite.sparse_decode(*there, **kwargs)
    return out.cpu(), lse.cpu()


ON_GPU = sparse_runs.Machine(attend)
check, exact = ON_GPU.check, ON_GPU.exact
