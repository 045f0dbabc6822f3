"""Builds the code objects while the package is built, without torch. Metadata is in pyproject.toml.

In the environment of `pip install .`, MLA_SUITE_ARCHS=gfx942,sm_90 limits the objects to these archs (the default is
all of them) and MLA_SUITE_DISABLE_FP16=1 leaves out kernels for fp16 caches.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).absolute().parent

for link in ("ops", "csrc"):
    if not (ROOT / "mla_suite" / link).is_dir():
        sys.exit(
            f"mla_suite/{link} is not a link to ../{link}: this copy lost its links, as a zip archive's does; "
            f"get the repository with git clone, or run: rm -f mla_suite/{link}; ln -s ../{link} mla_suite/{link}"
        )

CSRC = ROOT / "mla_suite" / "csrc"  # a link in a clone, a folder in an sdist
KNOWN = sorted(path.parent.name for path in CSRC.glob("*/arch.toml"))
if not KNOWN:
    sys.exit("mla_suite/csrc has no arch: this copy lost the kernels' sources; get the repository with git clone")
ARCHS = sorted({name.strip() for name in os.environ.get("MLA_SUITE_ARCHS", "").split(",")} - {""})
if not set(ARCHS) <= set(KNOWN):
    sys.exit(f"MLA_SUITE_ARCHS names {', '.join(sorted(set(ARCHS) - set(KNOWN)))}; the archs are {', '.join(KNOWN)}")

DISABLE_FP16 = os.environ.get("MLA_SUITE_DISABLE_FP16", "0")
if DISABLE_FP16 not in ("0", "1"):
    sys.exit(f"MLA_SUITE_DISABLE_FP16 is {DISABLE_FP16!r}; it takes 1, which leaves out kernels for fp16 caches, or 0")
FP16 = DISABLE_FP16 == "0"


class BuildWithObjects(build_py):
    """Copies the Python files, then compiles the kernels into the package that is being built."""

    def run(self) -> None:
        if not self.editable_mode:  # modules of another version
            shutil.rmtree(Path(self.build_lib) / "mla_suite", ignore_errors=True)
        super().run()
        sys.path.insert(0, str(ROOT))
        from mla_suite import build

        # Both kinds of install build in the source tree, so that the second one compiles nothing again, though pip puts
        # the compiler elsewhere each time. An editable install keeps what the tree holds of other archs; a wheel
        # carries the named ones alone.
        package = ROOT / "mla_suite" / "objects"
        try:
            manifest = build.build(ARCHS or None, csrc=CSRC, out=package, fp16=FP16)
        except (build.BuildError, build.ObjectError) as error:
            sys.exit(str(error))
        if self.editable_mode:
            return
        target = Path(self.build_lib).absolute() / "mla_suite" / "objects"
        shutil.rmtree(target, ignore_errors=True)  # objects of another selection and the compilers' own files
        shipped = manifest.only_archs(ARCHS or KNOWN)
        for name in shipped.files():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package / name, target / name)
        (target / "manifest.json").write_text(shipped.to_json(), encoding="utf-8")


class PlatformDistribution(Distribution):
    """Marks the package as bound to a platform, though setuptools compiles nothing for it."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """Makes one wheel for every Python version, since nothing in it is linked to Python.

    The emulator's library in it needs x86-64 Linux with glibc 2.28; on another machine the wheel is for that machine.
    """

    def get_tag(self) -> tuple[str, str, str]:
        if sysconfig.get_platform() == "linux-x86_64":
            return "py3", "none", "manylinux_2_28_x86_64"
        return "py3", "none", super().get_tag()[2]


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithObjects, "bdist_wheel": PlatformWheel})
