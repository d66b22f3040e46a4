"""Imports of megatron-core and Megatron-Bridge: versions, missing packages, and what an import must not keep."""

import importlib
import importlib.util
import sys
import threading
import weakref

import megatron_on_cpu
import pytest
import torch

from verl_fn.backends.megatron import importing

INSTALLED = all(importlib.util.find_spec(name) for name in ("megatron", "megatron.bridge"))
pytestmark = pytest.mark.skipif(not INSTALLED, reason="megatron-core and megatron-bridge are not installed")


def test_versions_and_folders_are_those_of_this_environment():
    assert importing.about() == {
        name: f"{importing.TESTED[name][0]} ({importlib.util.find_spec(module).submodule_search_locations[0]})"
        for name, module in importing.PACKAGES.items()
    }


@pytest.mark.parametrize("name", importing.PACKAGES)
def test_other_versions_are_refused(monkeypatch, tmp_path, name):
    """By the code that is imported: a checkout may stand before what was installed."""
    (tmp_path / "package_info.py").write_text('MAJOR = 0\nMINOR = 99\nPATCH = 1\nPRE_RELEASE = "rc2"\n')
    folder = importing._folder
    monkeypatch.setattr(importing, "_folder", lambda n: tmp_path if n == name else folder(n))
    with pytest.raises(importing.MegatronMissing, match=rf"{name} in /.* is 0\.99\.1rc2, and .* tested with 0\."):
        importing.check_installed()
    monkeypatch.setenv(importing.UNTESTED, "1")
    assert importing.about()[name] == f"0.99.1rc2 ({tmp_path})"


def test_a_build_for_one_platform_is_the_tested_version(monkeypatch):
    version = importing._version
    monkeypatch.setattr(importing, "_version", lambda n: f"{version(n)}+cu130")
    importing.check_installed()


def test_a_missing_package_is_named(monkeypatch):
    real = importing.importlib.util.find_spec
    monkeypatch.delitem(importing.sys.modules, "omegaconf", raising=False)
    monkeypatch.setattr(importing.importlib.util, "find_spec", lambda n: None if n == "omegaconf" else real(n))
    with pytest.raises(importing.MegatronMissing, match=r"no package omegaconf; install it with .*omegaconf==2"):
        importing.check_installed()


def test_a_module_that_keeps_an_error_keeps_no_value_of_the_caller(tmp_path, monkeypatch):
    code = "try:\n    import no_such_package\nexcept ImportError as error:\n    ERROR = error\n"
    for name in ("keeps_an_error", "keeps_another"):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    def held_after(load):
        value = torch.zeros(1)
        load()
        return weakref.ref(value)

    assert held_after(lambda: importing.import_apart(["keeps_an_error"]))() is None
    assert held_after(lambda: importlib.import_module("keeps_another"))() is not None
    with pytest.raises(ImportError, match="no_such_module"):
        importing.import_apart(["no_such_module"])


def test_an_old_python_is_refused(monkeypatch):
    monkeypatch.setattr(importing.sys, "version_info", (3, 11, 9))
    with pytest.raises(importing.MegatronMissing, match=r"needs Python 3\.12, and this is Python 3\.11"):
        importing.load_bridge.__wrapped__()


def test_the_replacement_of_cuda_is_installed_where_other_threads_can_import(monkeypatch, tmp_path):
    """Megatron is imported in a thread of its own, which a finder would wait for with the lock that it needs."""
    for name in ("late_backend", "late_library"):
        (tmp_path / f"{name}.py").write_text("")
    waiting = []

    def install():
        thread = threading.Thread(target=importlib.import_module, args=("late_library",), daemon=True)
        thread.start()
        thread.join(10)
        waiting.append(thread.is_alive())

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(megatron_on_cpu, "BACKEND", "late_backend")
    monkeypatch.setattr(megatron_on_cpu, "install", install)
    megatron_on_cpu.install_with_backend()
    importlib.import_module("late_backend")
    assert waiting == [False] and "late_library" in sys.modules
