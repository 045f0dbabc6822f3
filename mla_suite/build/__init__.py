"""The build layer: declared instances -> ninja -> code objects, budgets, manifest. It needs no torch and no numpy."""

from mla_suite.build.builder import build
from mla_suite.build.locations import BuildError, ObjectError
from mla_suite.build.manifest import KernelEntry, Manifest

__all__ = ["BuildError", "KernelEntry", "Manifest", "ObjectError", "build"]
