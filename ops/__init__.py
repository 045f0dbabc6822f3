"""Floor 3: one folder per operator. Importing this package registers them all with `torch.library`."""

from mla_suite.core import dispatch
from mla_suite.launch import current_arch
from mla_suite.ops.append_kv import append_kv as append_kv
from mla_suite.ops.combine import combine as combine
from mla_suite.ops.decode import decode as decode
from mla_suite.ops.decode.workers import workers as workers
from mla_suite.ops.plan import plan as plan
from mla_suite.ops.sparse_decode import sparse_decode as sparse_decode

dispatch.set_arch_resolver(current_arch)
