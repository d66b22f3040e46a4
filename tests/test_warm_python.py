"""The warm Python of the tests does what Python does, and its processes end with it."""

import os
import signal
import subprocess
import sys

import pytest
from warm_python import GROUP, warm_python

from verl_fn.driver.processes import end, runs

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="no warm Python where there is a GPU")


def ran(python, *arguments, **options):
    ended = subprocess.run([python, *arguments], capture_output=True, text=True, **options)
    return ended.returncode, ended.stdout, ended.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import sys; print(sys.argv, sys.path[0], __name__)", "a b", "'"],
        ["-u", "-c", "import os, sys; print(os.getcwd(), sys.stdin.read()); raise SystemExit(3)"],
        ["-c", "1 / 0"],
        ["-c", "raise SystemExit('wrong')"],
        ["-c", "import atexit; atexit.register(print, 'ends')"],
        ["-m", "base64", "-e", __file__],
        [__file__, "1"],
        ["-S", "-c", "import sys; print(sys.flags.no_site)"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_it_is_python(warm, tmp_path, arguments):
    options = {"cwd": tmp_path, "input": "hello"}
    assert ran(warm, *arguments, **options) == ran(sys.executable, *arguments, **options)


def test_it_is_warm_unless_its_imports_would_have_been_others(warm, tmp_path):
    code = "import sys; print('torch' in sys.modules)"
    assert ran(warm, "-c", code)[1] == "True\n"
    assert ran(warm, "-c", code, env=os.environ | {"PYTHONPATH": str(tmp_path)})[1] == "False\n"


def test_another_with_more_imports_is_forked_from_it(warm, tmp_path):
    (tmp_path / "more.py").write_text("import this")
    code = "import sys; print({'torch', 'this'} <= sys.modules.keys(), sys.stdin.read())"
    with warm_python(tmp_path / "more.py", python=warm) as python:
        assert ran(python, "-c", code, input="hello") == (0, "True hello\n", [])
    assert ran(warm, "-c", code, input="hello")[1] == "False hello\n"


def test_its_processes_start_warm_ones(warm):
    assert ran(warm, "-c", "import sys; print(sys.executable)")[1] == f"{warm}\n"
    code = "from multiprocessing import spawn; print(spawn.get_executable().decode())"
    assert ran(warm, "-c", code)[1] == f"{warm}\n"


def test_files_are_inherited(warm):
    ours, theirs = os.pipe()
    subprocess.run([warm, "-c", f"import os; os.write({theirs}, b'here')"], pass_fds=[theirs], check=True)
    os.close(theirs)
    assert os.read(ours, 10) == b"here" and os.read(ours, 10) == b""
    os.close(ours)


def test_files_are_inherited_whatever_their_numbers(warm):
    """The server has files of its own with these numbers."""
    code = "import os; [os.write(number, b'.') for number in range(3, 10)]"
    copies = " ".join(f"{number}>&1" for number in range(3, 10))
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {copies}', "sh", warm, "-c", code], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, 7 * "."), ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_signals_reach_the_process(warm, number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    executable = subprocess.Popen([warm, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid = int(executable.stdout.readline())
    assert pid != executable.pid and runs(pid)
    executable.send_signal(number)
    assert executable.wait() == -number
    end(lambda: [pid])
    executable.stdout.close()


def test_signals_reach_what_the_process_has_started_where_that_is_asked_for(warm):
    code = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    for more, ends in (({}, False), ({GROUP: "1"}, True)):
        executable = subprocess.Popen([warm, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | more)
        pid = int(executable.stdout.readline())
        executable.send_signal(signal.SIGTERM)
        assert executable.wait() == -signal.SIGTERM
        if ends:
            end(lambda pids=(pid,): pids)
        else:
            assert runs(pid)
            os.kill(pid, signal.SIGKILL)
        executable.stdout.close()


if __name__ == "__main__":
    print(sys.argv, sys.path[0])
