"""The questions that an integration asks of another project, answered by interfaces of our own."""

import importlib
import sys
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import pytest

from mla_suite.integrations import interface


def installed(version="1.4.2"):
    return interface.Interface("ours", "theirs", version, ("1.2", "1.4"), "leave it")


def method(self, a, b, *, c=0, **options):
    return a, b, c, options


def hook(self, a, *args, **kwargs):
    return method(self, a, *args, **kwargs)


@dataclass
class Record:
    a: int
    b: int = 0


def test_what_fits_is_taken():
    installed().takes("it", method, ("a", "b"), {"c"})
    installed().takes("it", method, {"c", "b"}, {"a"})
    installed().takes("it", method, {"a"})
    installed().takes("it", Record, {"a", "b"}, ())
    installed().takes("it", hook, ("a", "b"), {"c"})
    installed().has("it", Record(0), ("a", "b"))
    installed().implemented("it", Record)


@pytest.mark.parametrize(
    ("needed", "known", "how"),
    [
        (("a", "x"), None, "takes no x"),  # its **options do not mean x
        (("b", "a"), None, "takes its arguments in another order: a, b"),
        ({"b", "a"}, (), "takes c, whose meaning is not known here"),
    ],
)
def test_what_differs_is_refused_in_a_sentence(needed, known, how):
    with pytest.raises(
        TypeError, match=rf"^ours: it of theirs 1\.4\.2 {how}; install theirs 1\.2 to 1\.4, or leave it$"
    ):
        installed().takes("it", method, needed, known)


def test_missing_attributes_and_methods_are_refused():
    class Base(ABC):
        @abstractmethod
        def later(self):
            raise AssertionError

    with pytest.raises(TypeError, match=r"Record of theirs .* has no c, d;"):
        installed().has("Record", Record(0), ("a", "c", "d"))
    with pytest.raises(TypeError, match=r"Base of theirs .* has methods that are not implemented here: later;"):
        installed().implemented("Base", type("Own", (Base,), {}))


@pytest.mark.parametrize("version", ["1.1", "1.4", "1.4.9", "1.4.9.dev3+g12"])
def test_a_release_that_is_not_newer_gives_no_warning(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed(version).warn_if_newer(1)


@pytest.mark.parametrize("version", ["1.5rc1", "2.0", "10.0.dev1"])
def test_a_newer_release_gives_one_warning(version):
    with pytest.warns(
        UserWarning, match=f"^ours: theirs {version} is newer than 1.4, the newest that mla_suite was"
    ) as found:
        installed(version).warn_if_newer(1)
    assert found[0].filename == __file__, "the caller is named"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed(version).warn_if_newer(1)


@pytest.mark.parametrize(("name", "needs"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_without_the_server_the_import_says_so(monkeypatch, name, needs):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"mla_suite.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"mla_suite.integrations.{name} needs {needs}"):
        importlib.import_module(f"mla_suite.integrations.{name}")
