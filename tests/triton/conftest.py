"""Triton reads TRITON_INTERPRET when imported, so these tests have a process of their own: test_interpreter.py."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    names = ("append_kv", "chase", "combine", "decode", "absorb", "qkv_down_proj", "plan", "sparse_decode")
    names += ("peer_memory", "stock_reduce")
    collect_ignore = [f"test_{name}.py" for name in names]
