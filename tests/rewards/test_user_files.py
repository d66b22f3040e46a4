"""Files of the user: of one name in several folders, with neighbours, and in the processes that their code starts."""

import importlib.util
import json
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from verl_fn import user_files
from verl_fn.config import ConfigError
from verl_fn.config.names import load_object
from verl_fn.data.tasks import Problem
from verl_fn.rewards.functions import RewardFunctions
from verl_fn.rewards.reward import Answer, RewardError

POOLS = """
from __future__ import annotations
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from .helper import WORTH

@dataclass
class Judged:
    worth: float

def judge(text):
    return Judged(WORTH * len(text))

def score(data_source, solution_str, ground_truth, extra_info=None):
    with ProcessPoolExecutor(1, multiprocessing.get_context(data_source)) as pool:
        found = pool.submit(judge, solution_str).result()
    return {"score": found.worth, "same_class": type(found) is Judged}
"""


def folder(place: Path, worth: float, source: str = POOLS, name: str = "reward.py") -> Path:
    place.mkdir(parents=True)
    (place / "helper.py").write_text(f"WORTH = {worth}\n")
    (place / name).write_text(source)
    return place / name


def test_pools_of_two_files_of_one_name(tmp_path):
    """Processes that are forked have the module; those that are spawned import it by its name."""
    one, other = folder(tmp_path / "a", 1.0), folder(tmp_path / "b.c @%", 10.0)
    functions = RewardFunctions([f"{one}:score", f"{other}:score"], timeout=60)
    found = functions([Answer(Problem("q", "", 1, kind), "abc") for kind in ("fork", "spawn")])
    for result in found:
        assert (result["score"], result["a.reward.score/score"], result["b.c @%.reward.score/score"]) == (33, 3, 30)
        assert result["a.reward.score/same_class"] == result["b.c @%.reward.score/same_class"] == 1.0


def test_objects_of_a_file_travel_to_any_process_that_imports_this_package(tmp_path):
    file = folder(tmp_path / "a", 2.0)
    judge, cls = (load_object(f"{file}:{name}", "key") for name in ("judge", "Judged"))
    assert pickle.loads(pickle.dumps(cls(3.0))) == cls(3.0)
    with ProcessPoolExecutor(1) as pool:
        assert pool.submit(judge, "abcd").result() == cls(8.0)
    (tmp_path / "pickled").write_bytes(pickle.dumps(judge))
    program = "import pickle, sys, verl_fn\nprint(pickle.load(open(sys.argv[1], 'rb'))('ab'))"
    command = [sys.executable, "-c", program, tmp_path / "pickled"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "Judged(worth=4.0)\n"
    file.write_text("judge = 3\n")
    again = subprocess.run(command, capture_output=True, text=True)
    assert f"{file} has changed since another process has imported it" in again.stderr


def test_a_file_is_imported_once_until_it_changes(tmp_path):
    file = folder(tmp_path / "a", 1.0, "made = []\n")
    first = load_object(f"{file}:made", "key")
    assert load_object(f"{file.parent}/../a/reward.py:made", "key") is first
    file.write_text("made = [1]\n")
    assert load_object(f"{file}:made", "key") == [1]


def test_neighbours_of_a_file_are_found_and_hide_no_library(tmp_path, monkeypatch):
    libraries = folder(tmp_path / "libraries", 1.0, "", "library_of_others.py")
    file = folder(tmp_path / "mine", 1.0, "made = []\n")
    for name in ("library_of_others.py", "neighbour_of_mine.py"):
        (file.parent / name).touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(libraries.parent)])
    assert load_object(f"{file}:made", "key") == []
    found = [importlib.util.find_spec(name).origin for name in ("library_of_others", "neighbour_of_mine")]
    assert found == [str(libraries), str(file.parent / "neighbour_of_mine.py")]


def test_packages_around_a_file_give_it_their_modules_and_do_not_run(tmp_path):
    file = folder(
        tmp_path / "pkg/inner", 1.0, "from ..common import WORD\nfrom . import helper\nfrom .sub import X\n"
    )
    for place in (tmp_path / "pkg", file.parent):
        (place / "__init__.py").write_text("raise RuntimeError('it asks for much')\n")
    (tmp_path / "pkg/common.py").write_text("WORD = 'common'\n")
    (file.parent / "sub").mkdir()
    (file.parent / "sub/__init__.py").write_text("X = 5\n")
    module = user_files.load(file)
    assert (module.WORD, module.helper.WORTH, module.X) == ("common", 1.0, 5)
    assert Path(module.__file__) == file and module.__name__.startswith(f"file:{tmp_path}/.pkg/.inner/.reward@")


@pytest.mark.parametrize(
    "statement", ["import helper", "from helper import WORTH", "def later():\n    import helper"]
)
def test_two_neighbours_of_one_name_are_refused_where_one_would_hide_the_other(statement, tmp_path, monkeypatch):
    monkeypatch.setattr(user_files, "_claimed", {})
    for place in ("a", "b"):
        folder(tmp_path / place, 1.0, statement + "\ndef made(**keywords): ...\n")
    assert load_object(f"{tmp_path}/a/reward.py:made", "key")() is None
    with pytest.raises(ConfigError, match=rf"{tmp_path}/b/reward.py imports helper, of which there are two: .*write"):
        load_object(f"{tmp_path}/b/reward.py:made", "key")
    with pytest.raises(RewardError, match=r"importing .*b/reward.py raised ImportError: .*imports helper, of which"):
        RewardFunctions([f"{tmp_path}/{place}/reward.py:made" for place in ("a", "b")])


def test_code_travels_over_ray_with_its_neighbours(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    from verl_fn.driver.ray import send_code

    file = folder(tmp_path / "a", 2.0)
    judge = load_object(f"{file}:judge", "key")
    send_code([f"{file}:judge"])
    pickled = ray.cloudpickle.dumps(judge)
    for name in [name for name in sys.modules if name.startswith(f"file:{tmp_path}")]:
        monkeypatch.delitem(sys.modules, name)
    shutil.rmtree(file.parent)
    assert pickle.loads(pickled)("abc").worth == 6.0


def test_imports_of_a_file_are_followed_in_its_folder(tmp_path):
    """Neighbours of neighbours and packages, each once, and no library."""
    main = folder(tmp_path / "a", 1.0, "import json, other.deep\nfrom . import helper\nfrom pkg.inner import X\n")
    (main.parent / "other.py").write_text("from .reward import Y\nfrom third import Z\n")
    (main.parent / "third.py").write_text("import broken\n")
    (main.parent / "broken.py").write_text("import = 3\n")
    (main.parent / "unused.py").touch()
    (main.parent / "pkg/inner").mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/inner/more.py"):
        (main.parent / name).touch()
    names = [str(file.relative_to(main.parent)) for file in user_files.with_imports(main)]
    assert names[0] == "reward.py" and sorted(names[1:]) == [
        "broken.py", "helper.py", "other.py", "pkg/__init__.py", "pkg/inner/more.py", "third.py",
    ]  # fmt: skip
    assert list(user_files.code_files(str(main))) == user_files.with_imports(main)


def test_code_of_a_module_is_found_in_the_working_directory_and_not_of_a_library(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    for name in ("mine.py", "helper.py", "whole/__init__.py", "whole/part.py", "site-packages/theirs.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import helper\n" if name == "mine.py" else "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site-packages")])

    def found(module):
        return [str(file.relative_to(tmp_path)) for file in user_files.code_files(module)]

    assert found("mine") == ["mine.py", "helper.py"]
    assert found("whole.part") == ["whole/__init__.py", "whole/part.py"]
    assert [found(module) for module in ("theirs", "no_such_module", "torch")] == [[], [], []]


@pytest.mark.parametrize(("folder", "is_users"), [("dist-packages", False), ("site-packages", False), ("own", True)])
def test_installed_packages_are_not_the_users_code(tmp_path, monkeypatch, folder, is_users):
    """Containers of NVIDIA have dist-packages."""
    (place := tmp_path / folder).mkdir()
    (place / "engine_of_test.py").write_text("def start():\n    raise AssertionError('no room')\n")
    monkeypatch.syspath_prepend(place)
    with pytest.raises(AssertionError) as raised:
        importlib.import_module("engine_of_test").start()
    sys.modules.pop("engine_of_test")
    inner = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    assert bool(user_files.own_traceback(inner)) == is_users
    assert bool(list(user_files.code_files("engine_of_test"))) == is_users


def test_the_place_of_an_error_is_the_users_last_line(tmp_path):
    file = folder(
        tmp_path / "a",
        1.0,
        "import json\n\ndef later(text):\n    return json.loads(text)\n\nfirst = lambda text: later(text)\n",
    )
    with pytest.raises(ValueError) as raised:
        user_files.load(file).first("{")
    assert user_files.place_of(raised.value, __file__) == f" (at {file}:4)"
    lines = user_files.own_traceback(raised.value, frames_only=True)
    assert [line for line in lines if "File" in line][-1] == f'  File "{file}", line 4, in later'
    assert not any("JSONDecodeError" in line or "json/" in line for line in lines)
    assert user_files.own_traceback(raised.value)[-1].startswith("json.decoder.JSONDecodeError: ")
    source = "from verl_fn.state import Batch\n\nmade = lambda: Batch.from_rows('x')\n"
    with pytest.raises(Exception) as raised:
        user_files.load(folder(tmp_path / "c", 1.0, source)).made()
    assert user_files.place_of(raised.value, __file__) == f" (at {tmp_path}/c/reward.py:3)", "not in this package"
    with pytest.raises(ValueError) as raised:
        json.loads("{")
    assert "json/" in user_files.place_of(raised.value, __file__) and user_files.own_traceback(raised.value) != []
    inner = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    assert user_files.own_traceback(inner) == [], "no line of the user's"
    broken = folder(tmp_path / "b", 1.0, "x = 1\ny = = 2\n")
    with pytest.raises(SyntaxError) as raised:
        user_files.load(broken)
    assert user_files.place_of(raised.value, __file__) == f" (at {broken}:2)"
