"""Triton reads TRITON_INTERPRET when imported, so test_interpreter.py gives these files a process of their own."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*_interpreted.py"]
