"""`python -m mla_suite <command>`: the commands are listed in `mla_suite.cli`."""

import argparse
import importlib
import inspect
import io
import os
import sys
from collections.abc import Sequence

import mla_suite
from mla_suite.cli import COMMANDS, INTERRUPTED
from mla_suite.errors import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    if mla_suite.__file__ is None:
        folder = next(iter(mla_suite.__path__))
        print(f"the folder {folder} hides the installed package of its name; run this from elsewhere", file=sys.stderr)
        return 2
    arguments = list(sys.argv[1:] if argv is None else argv)
    listing = "\n".join(f"  {name:10}{summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m mla_suite",
        description=f"Multi-head latent attention decode for PyTorch.\n\ncommands:\n{listing}",
        epilog="python -m mla_suite <command> --help explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s <command> [options]",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of the commands above")
    if not arguments:
        parser.print_help()
        return 2
    command = parser.parse_args(arguments[:1]).command
    module = importlib.import_module(f"mla_suite.cli.{command}")
    own = argparse.ArgumentParser(
        prog=f"python -m mla_suite {command}",
        description=inspect.getdoc(module),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(own)
    try:
        result: int = module.run(own.parse_args(arguments[1:]))
        sys.stdout.flush()
    except UsageError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python writes the rest at exit, and fails
        return 1  # as rich does where it prints
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        return INTERRUPTED
    return result


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe would hold lines back until 8 KiB have come
    sys.exit(main())
