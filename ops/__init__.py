"""Floor 3: one folder per operator. Importing this package registers them all with `torch.library`."""

from mla_suite.ops.combine import combine as combine
