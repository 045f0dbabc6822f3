"""Floor 2: instances wanted -> build.ninja -> code objects with budgets and a manifest. Needs no torch, no numpy."""

from mla_suite.build.builder import build
from mla_suite.build.errors import BuildError, ObjectError
from mla_suite.build.manifest import KernelEntry, Manifest

__all__ = ["BuildError", "KernelEntry", "Manifest", "ObjectError", "build"]
