"""Metadata is in pyproject.toml; this builds the code objects while the package is built, without torch."""

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


class BuildWithObjects(build_py):
    """Copies the Python files, then compiles the kernels into the package that is being built."""

    def run(self) -> None:
        super().run()
        sys.path.insert(0, str(ROOT))
        from mla_suite import build

        if self.editable_mode:
            build.build(csrc=ROOT / "csrc", out=ROOT / "mla_suite" / "objects")
            return
        staged = Path(self.get_finalized_command("build").build_temp).absolute() / "objects"
        manifest = build.build(csrc=ROOT / "csrc", out=staged)
        target = Path(self.build_lib).absolute() / "mla_suite" / "objects"
        shutil.rmtree(target, ignore_errors=True)  # objects of the source tree's own builds
        for name in manifest.files():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(staged / name, target / name)


class PlatformDistribution(Distribution):
    """Says that the package is bound to a platform, though setuptools compiles nothing for it."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """One wheel for every Python: nothing in it is linked to one. The emulator's library, where it is in it, is of
    x86-64 Linux with glibc 2.28; elsewhere the wheel is of the machine that made it."""

    def get_tag(self) -> tuple[str, str, str]:
        if sysconfig.get_platform() == "linux-x86_64":
            return "py3", "none", "manylinux_2_28_x86_64"
        return "py3", "none", super().get_tag()[2]


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithObjects, "bdist_wheel": PlatformWheel})
