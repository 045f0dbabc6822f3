"""One folder per operator. Importing this package registers them all with `torch.library`.

The package binds no function: `mla_suite.ops.decode` is the module, `mla_suite.decode` the function.
"""

from mla_suite.core import dispatch
from mla_suite.launch import current_arch, run
from mla_suite.ops import append_kv as append_kv
from mla_suite.ops import combine as combine
from mla_suite.ops import convert_kv as convert_kv
from mla_suite.ops import decode as decode
from mla_suite.ops import plan as plan
from mla_suite.ops import sparse_decode as sparse_decode

dispatch.arch_of, dispatch.launcher = current_arch, run.prepare
