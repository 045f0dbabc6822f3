"""The exceptions of the build."""

from __future__ import annotations


class BuildError(RuntimeError):
    """A code object could not be made; the text begins with the compiler's own message, if there is one."""


class ObjectError(RuntimeError):
    """A built object or its manifest may not be used: absent, altered, stale, or writable by others."""
