"""Triton reads TRITON_INTERPRET when imported, so these tests have a process of their own: test_interpreter.py."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["test_combine.py", "test_decode.py", "test_append_kv.py", "test_plan.py", "test_sparse_decode.py"]
