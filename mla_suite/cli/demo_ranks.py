"""`demo --tp N --cp M` under torchrun: the demo's decoder with its attention spread over the ranks."""

from __future__ import annotations

import copy
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mla_suite.cli import demo_model
from mla_suite.cli.demo_model import Decoder
from mla_suite.distributed import ContextParallelCache, Parallel, ParallelMLA, check_agreement
from mla_suite.distributed.parallel import initialise
from mla_suite.errors import UsageError

TIMEOUT_S = 60.0  # of every collective
COLLECTIVE_ERRORS = ("gloo", "Connection closed", "device-side assert")  # words of a collective that broke off


def decode(
    tp_size: int, cp_size: int, tokens: int, layers: int, kv_format: str, seed: int, *, quiet: bool
) -> dict[str, Any] | None:
    """The report of `demo_model.decode`, with the largest difference of any rank; None where a rank fails, and says why
    in one sentence."""
    try:
        device = initialise(TIMEOUT_S)
        ranks = f"{tp_size} tensor parallel x {cp_size} context parallel, {dist.get_backend()} on {device.type}"
        used, quiet = _described(device), quiet or dist.get_rank() > 0
        if not quiet:
            print(f"device: {used}", flush=True)
        parallel = Parallel.create(tp_size=tp_size, cp_size=cp_size, device_type=device.type, timeout_s=TIMEOUT_S)
        check_agreement({"tokens": tokens, "seed": seed, "torch": torch.__version__})
        with torch.device(device):
            own: dict[str, Any] = dict(spread=partial(_spread, parallel), tp_size=parallel.tp_size)
            own |= dict(make_cache=partial(ContextParallelCache, shard=parallel.shard()))
            report = demo_model.decode(tokens, layers, kv_format, seed, quiet=quiet, **own)
        differences: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(differences, report["largest_logit_difference"])
    except (ValueError, RuntimeError) as error:
        sentence = str(error).strip().split("\n")[0]
        if isinstance(error, dist.DistError) or any(word in sentence for word in COLLECTIVE_ERRORS):
            sentence = (
                f"another rank ended or did not answer within {TIMEOUT_S:.0f} s; its own sentence says why ({sentence})"
            )
        if "RANK" not in os.environ:
            raise UsageError(sentence) from error
        sys.stderr.write(f"demo: rank {os.environ['RANK']}: {sentence}\n")  # one write: the ranks share the stream
        return None
    dist.destroy_process_group()
    return {"device": used, "ranks": ranks} | report | {"largest_logit_difference": max(differences)}


def _spread(parallel: Parallel, whole: Decoder) -> Decoder:
    """A copy whose attention is spread over the ranks; each rank has all the rest."""
    spread = copy.deepcopy(whole)
    for block in spread.blocks:
        layer, dtype = block.attention, block.attention.o_proj.weight.dtype
        block.attention = ParallelMLA(layer.config, parallel, kv_format=layer.kv_format, dtype=dtype)
        block.attention.load_full_weights(layer.state_dict())
    return spread


def _described(device: torch.device) -> str:
    """Names the device of the ranks, and says what else they could use."""
    ranks = f"{dist.get_world_size()} ranks over {dist.get_backend()}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {ranks}"
    found = torch.cuda.device_count()
    return f"CPU, {ranks}; they would use a GPU each if this host had as many, and torch finds {found}"
