"""Where and with what a number was measured."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import mla_suite
from mla_suite.launch import cuda, hip

PACKAGE = Path(__file__).absolute().parent.parent


def describe(device: torch.device) -> dict[str, str | int | bool]:
    """Machine, driver, versions, date and commit; what cannot be found out is an empty string."""
    here: dict[str, str | int | bool] = {
        "arch": "cpu",
        "device": _processor(),
        "compute_units": torch.get_num_threads(),
        "driver": "",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gcn = getattr(properties, "gcnArchName", "")
        here = {
            "arch": gcn.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}",
            "device": properties.name,
            "compute_units": properties.multi_processor_count,
            "driver": cuda.module_version() or hip.module_version(),
        }
    return {
        **here,
        "cuda": torch.version.cuda or "",
        "rocm": torch.version.hip or "",
        "torch": torch.__version__,
        "triton": version("triton"),
        "mla_suite": mla_suite.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        **_commit(),
    }


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", listed.read_text(), re.M) if listed.is_file() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def version(package: str) -> str:
    """The version of an installed package; '' where there is none, or a checkout on the path."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def versions(*packages: str) -> str:
    """Of packages, if they are installed, and the GPU, in words."""
    named = [f"{name} {version(name)}" for name in packages if version(name)]
    return ", ".join([*named, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"])


def _commit() -> dict[str, str | bool]:
    """Commit of the checkout the package runs from; `changed` when tracked files differ from it."""
    if not (PACKAGE.parent / ".git").exists():
        return {"commit": "", "changed": False}
    git = ["git", "-C", str(PACKAGE.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20, check=True)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or not a repository it trusts: the commit is unknown
        return {"commit": "", "changed": False}
    return {"commit": head.stdout.strip(), "changed": bool(changed.stdout.strip())}
