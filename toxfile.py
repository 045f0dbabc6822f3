"""tox, taught to skip: an environment whose `needs` cannot be had is shown as SKIP with the reason, never as OK."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

from tox.config.sets import ConfigSet
from tox.config.types import Command
from tox.execute.request import StdinSource
from tox.plugin import impl
from tox.session.state import State
from tox.tox_env.api import ToxEnv
from tox.tox_env.errors import Fail, Skip

SKIPPED: int = run_path(str(Path(__file__).parent / "tools/skip.py"))["STATUS"]
"""Status of a check that cannot run here; its last line of output says what cannot be had."""


@impl
def tox_add_env_config(env_conf: ConfigSet, state: State) -> None:
    env_conf.add_config(
        keys=["needs"],
        of_type=list[Command],
        default=[],
        desc=f"commands that fetch what the environment needs; one that ends with status {SKIPPED} skips it",
    )


@impl
def tox_before_run_commands(tox_env: ToxEnv) -> None:
    for command in tox_env.conf["needs"]:
        outcome = tox_env.execute(command.args, StdinSource.user_only(), show=True, cwd=tox_env.core["tox_root"])
        if outcome.exit_code == SKIPPED:
            said = outcome.out.strip().splitlines()
            raise Skip(said[-1].removeprefix("skipped: ") if said else f"{command.shell} could not begin")
        if outcome.exit_code:
            raise Fail(f"{command.shell} ended with {outcome.exit_code}")
