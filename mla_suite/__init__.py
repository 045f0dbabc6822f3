"""Multi-head latent attention (MLA) decode operators for PyTorch on any GPU.

Importing this package registers `torch.ops.mla_suite.*`. It needs no GPU, no triton and no compiler. Where torch is not
installed, as in the isolated environment in which `pip install .` builds the kernels, only `mla_suite.build` works.
"""

import importlib.util
from pathlib import Path

__version__ = "0.1.0"
__all__ = ["allow_reference", "append_kv", "batch_invariant_split_size", "check", "combine", "convert_kv", "debug"]
__all__ += ["decode", "early_launch", "emulate", "explain", "plan", "sparse_decode"]

for _link in ("ops", "csrc"):
    if not (Path(__file__).parent / _link).is_dir():
        raise ImportError(
            f"mla_suite/{_link} is not a link to ../{_link}: this copy lost its links, as a zip archive's does; "
            f"get the repository with git clone, or run: rm -f mla_suite/{_link}; ln -s ../{_link} mla_suite/{_link}"
        )

if importlib.util.find_spec("torch") is not None:
    from mla_suite.core.check_mode import check as check
    from mla_suite.core.checks import debug as debug
    from mla_suite.core.dispatch import allow_reference as allow_reference
    from mla_suite.core.explain import explain as explain
    from mla_suite.launch import early_launch as early_launch
    from mla_suite.launch import emulate as emulate
    from mla_suite.ops.append_kv import append_kv as append_kv
    from mla_suite.ops.combine import combine as combine
    from mla_suite.ops.convert_kv import convert_kv as convert_kv
    from mla_suite.ops.decode import decode as decode
    from mla_suite.ops.plan import batch_invariant_split_size as batch_invariant_split_size
    from mla_suite.ops.plan import plan as plan
    from mla_suite.ops.sparse_decode import sparse_decode as sparse_decode
