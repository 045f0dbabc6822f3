"""`python -m mla_suite <command>`: the commands are listed in `mla_suite.cli`."""

import argparse
import errno
import importlib
import inspect
import io
import os
import sys
from collections.abc import Sequence

import mla_suite
from mla_suite.cli import COMMANDS, INTERRUPTED
from mla_suite.errors import UsageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a disk or a device answers to a write. Such an error with a file's name is about opening that file."""


def main(argv: Sequence[str] | None = None) -> int:
    if mla_suite.__file__ is None:
        folder = next(iter(mla_suite.__path__))
        print(f"the folder {folder} hides the installed package of its name; run this from elsewhere", file=sys.stderr)
        return 2
    if sys.stdout is None:  # the next file that is opened would get its number
        print("the standard output is closed; send it to a file or to /dev/null", file=sys.stderr)
        return 1
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
        _discard_output()
        return 1  # as rich does where it prints
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        _discard_output()
        print(f"{command}: the output cannot be written ({error.strerror})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        return INTERRUPTED
    return result


def _discard_output() -> None:
    """Sends what is left to /dev/null; Python would write it at exit, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe would hold lines back until 8 KiB have come
    sys.exit(main())
