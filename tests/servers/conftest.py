"""Settings that vLLM reads when it is imported; tests of a server are collected where it is installed (`tox -e`)."""

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers may share what few cores there are
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

collect_ignore_glob = [f"test_{name}_*" for name in ("sglang", "vllm") if importlib.util.find_spec(name) is None]
if importlib.util.find_spec("sglang") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # its Triton kernels run on a CPU

triton = importlib.util.find_spec("triton")
if triton is not None and triton.origin is None:
    # Without Triton the folder tests/triton passes for it, and torch takes it for the package.
    sys.path.remove(str(Path(__file__).parent.parent))
    sys.path_importer_cache.clear()
