"""How a check that cannot run on this machine ends: not as one that passed."""

STATUS = 77
"""The exit status of a skipped check, by the convention of automake; tox's summary shows it as `FAIL code 77`,
or as SKIP where the check stands in the environment's `needs` (toxfile.py)."""


def skip(reason: str) -> int:
    """Prints why the check cannot run here; returns the status to exit with."""
    print(f"skipped: {reason}")
    return STATUS
