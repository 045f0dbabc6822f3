"""Triton reads TRITON_INTERPRET when imported, so test_interpreter.py gives these files a process of their own."""

import os

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETS else ["test_*_interpreted.py"]

if INTERPRETS:
    import faster_interpreter

    faster_interpreter.install()
