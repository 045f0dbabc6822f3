"""Compile kernels with the compiler of this environment; a warning is as bad as a broken budget."""

import argparse
import subprocess
import sys


def main(archs: str, out: str, compiler: str = "") -> int:
    build = [sys.executable, "-m", "mla_suite", "build", "--arch", archs, "--out", out]
    done = subprocess.run([*build, *(["--rocm", compiler] if compiler else [])], stderr=subprocess.PIPE, text=True)
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode == 0 and "warning" in done.stderr.lower():
        print(f"the compiler warns about the kernels of {archs}: its messages are above", file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", help="names between commas")
    parser.add_argument("out", help="object folder")
    parser.add_argument("compiler", nargs="?", default="", help="path of a clang to use instead of the ziglang wheel's")
    sys.exit(main(**vars(parser.parse_args())))
