"""Triton reads TRITON_INTERPRET when imported; test_interpreter.py gives files that need it a process of their own."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*_interpreted.py"]
