"""Attention spread over several GPUs with torch.distributed: tensor parallel over heads, context parallel over keys.

`Parallel` holds the process groups of a layer, `ParallelMLA` is the layer on one rank, and `ContextParallelCache` is
the rank's share of the keys. `cp_decode` and `cp_sparse_decode` are the attention alone, for models that have a layer
of their own. All collectives are functional, so torch.compile traces through them and CUDA graphs capture them.
"""

from mla_suite.distributed.cache import ContextParallelCache
from mla_suite.distributed.context import cp_decode, cp_sparse_decode
from mla_suite.distributed.layer import ParallelMLA
from mla_suite.distributed.parallel import KeyShard, Parallel, check_agreement

__all__ = [
    "ContextParallelCache",
    "KeyShard",
    "Parallel",
    "ParallelMLA",
    "check_agreement",
    "cp_decode",
    "cp_sparse_decode",
]
