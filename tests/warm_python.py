"""A Python that has imported torch and transformers already, for processes that would import them for seconds.

A server imports them and forks. The executable that ``warm_python`` makes takes Python's arguments and asks the
server for a process with its own environment, folder and open files (``warm_client.py``). It passes signals on to
that process and ends as that does; if it is killed, so is the process. With WARM_PYTHON_GROUP set, signals go to all
processes that it has started, too, as a terminal sends them. If the server cannot obey an option or a setting
anymore, such as another PYTHONPATH, the executable is an ordinary Python.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib.util
import io
import marshal
import multiprocessing.spawn
import os
import runpy
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

from shared_fits import FOLDER, share_fits
from warm_client import options, settings

PRELOADED = (
    "verl_fn.backends.fsdp", "verl_fn.backends.local", "verl_fn.backends.mock", "verl_fn.backends.sampler",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3", "peft", "verl_fn.runs.loop",
    "verl_fn.cli.main", "verl_fn.backends.hf.new_model", "pyarrow.compute", "pyarrow.pandas_compat",
    "torch._inductor.compile_fx",  # ranks that share a sequence import it, also without compiled layers
)  # fmt: skip
# What Ray imports, where it is installed. Ray itself keeps settings of the process that imports it.
FOR_RAY = ("google.protobuf.descriptor_pb2", "jsonschema", "msgpack", "requests")
GROUP = "WARM_PYTHON_GROUP"
# So many new objects make the collector look for cycles. With 700, as Python has it, it takes a thirtieth of all time
# and finds little.
YOUNG = 10_000
MOST_FILES = 250


@contextlib.contextmanager
def warm_python(also=None, python=None, other=None, environment=os.environ):
    """Starts a server for the body; yields the path of the executable, which waits until the imports are done.

    ``also`` is a script that the server runs when it is first asked for a process, and ``python`` starts the server:
    another warm Python, or if it is None this process's own. ``other`` is another interpreter, which has only the
    imports of ``also`` if it has no torch. Processes have this environment, and so has the server of ``other``; in
    another server ``also`` sets it. Where there is a GPU, imports look for it, and CUDA's threads cannot be forked:
    the executable is an ordinary Python there.
    """
    if Path("/dev/nvidiactl").exists():
        yield str(other or sys.executable)
        return
    with tempfile.TemporaryDirectory(prefix="warm_") as folder:
        executable, place = Path(folder, "python"), Path(folder, "socket")
        client = Path(__file__).with_name("warm_client.py")
        expected = repr(settings(environment))
        command = [sys.executable, "-I", "-S", str(client), str(place), other or sys.executable, expected]
        executable.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        executable.chmod(0o700)
        server = subprocess.Popen(
            [other or python or sys.executable, __file__, str(place), *([str(also)] if also else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            # Arrow's allocator would start a thread, and so would compilers.
            env=(environment if other else os.environ)
            | {"JE_ARROW_MALLOC_CONF": "background_thread:false", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        try:
            assert server.stdout.readline() == b"ready\n", "the server of warm processes did not start"
            yield str(executable)
        finally:
            server.stdin.close()
            server.wait()


def serve(place, also=None):
    """Forks processes until stdin is closed; returns what to run in each of them, and in the server None."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    print("ready", flush=True)
    if not _warm_up(listener, place, also):
        return None
    wake, waked = os.pipe()
    os.set_blocking(waked, False)
    signal.set_wakeup_fd(waked)
    signal.signal(signal.SIGCHLD, lambda *args: None)
    children = {}  # the connection of each process; None if the executable has ended first
    groups = set()
    while True:
        ready, _, _ = select.select([0, wake, listener, *filter(None, children.values())], [], [])
        if 0 in ready:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return None
        for pid, connection in list(children.items()):
            if connection in ready:
                _forward(pid, children, os.killpg if pid in groups else os.kill)
        if wake in ready:
            os.read(wake, 4096)
            _report_ends(children)
        if listener in ready:
            connection, _ = listener.accept()
            request, files = _receive(connection)
            if request is None:
                connection.close()
                continue
            if pid := os.fork():
                # Here and in the process itself, whichever comes first; by now that may be another program.
                with contextlib.suppress(PermissionError):
                    os.setpgid(pid, pid)
                children[pid] = connection
                if GROUP in request["environment"]:
                    groups.add(pid)
                for file in files:
                    os.close(file)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # As they are collected they would close files of the process, which get their numbers.
            for one in (listener, connection, *filter(None, children.values())):
                one.detach()
            _take_over(request, files)
            return request["argv"]


def _warm_up(listener, place, also):
    """Imports what the processes are to have; returns False where none will be asked for."""
    # Imports make many objects that stay, and the collector would look through them again and again.
    gc.disable()
    for name in PRELOADED if importlib.util.find_spec("torch") else ():
        importlib.import_module(name)
    if importlib.util.find_spec("ray"):
        for name in FOR_RAY:
            importlib.import_module(name)
    if also is not None:
        if 0 in select.select([0, listener], [], [])[0]:
            return False
        # Modules that keep the path of Python as they are imported start processes like this one, and so does spawn.
        sys.executable = str(Path(place).with_name("python"))
        multiprocessing.spawn.set_executable(sys.executable)
        runpy.run_path(also)
    # A thread that was joined has ended for Python, and takes a moment more to end for the system.
    deadline = time.monotonic() + 30
    while len(threads := list(Path("/proc/self/task").iterdir())) > 1:
        named = [thread.joinpath("comm").read_text().strip() for thread in threads if time.monotonic() > deadline]
        assert not named, f"a process with several threads cannot be forked: {', '.join(named)}"
        time.sleep(0.01)
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG)
    return True


def _forward(pid, children, kill):
    """Sends a process the signal that its executable has got, or kills it if the executable has ended."""
    try:
        number = children[pid].recv(1)
    except OSError:
        number = b""
    if not number:
        children.pop(pid).close()
        children[pid] = None
        kill = os.kill
    kill(pid, number[0] if number else signal.SIGKILL)


def _report_ends(children):
    """Tells the executable of each process that has ended how it has ended."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if connection := children.pop(pid):
            with connection, contextlib.suppress(OSError):
                connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))


def _receive(connection):
    """Returns a request and its open files; None and no files if the executable has ended before it was sent."""
    head, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    size, text = struct.unpack("q", head)[0] if head else 1, b""
    while len(text) < size and (part := connection.recv(size - len(text))):
        text += part
    if len(text) == size:
        return marshal.loads(text), files
    for file in files:
        os.close(file)
    return None, []


def _take_over(request, files):
    """Gives this process the open files, the environment and the folder of the executable."""
    numbers = request["files"]
    above = max(numbers) + 1
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    os.closerange(0, above)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file >= above:
            with contextlib.suppress(OSError):
                os.close(file)
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    sys.executable = request["executable"]
    multiprocessing.spawn.set_executable(sys.executable)
    prompt = "PYTHONUNBUFFERED" in os.environ or "-u" in options(request["argv"])[0]
    # A server that was forked itself has such objects already, which would close these files as they go.
    sys.stdin = os.fdopen(0, closefd=False)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(number, "wb", buffering=0 if prompt else -1, closefd=False)
        errors = "backslashreplace" if number == 2 else "strict"
        setattr(sys, name, io.TextIOWrapper(stream, errors=errors, line_buffering=number == 2, write_through=prompt))
        setattr(sys, f"__{name}__", getattr(sys, name))
    if FOLDER in os.environ and "verl_fn.backends.hf.folder" in sys.modules:
        share_fits(os.environ[FOLDER])


def run(argv):
    """Does what Python does with these arguments."""
    given, argv = options(argv)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if argv[0] == "-m":
        sys.argv = argv[1:]
        if "-P" not in given:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[1])
        return
    if argv[0] == "-c":
        sys.argv, source, file, first = ["-c", *argv[2:]], argv[1], "<string>", ""
    else:
        fresh = "ray" not in sys.modules or not argv[0].endswith("default_worker.py")
        assert fresh, "the server has imported Ray with its own settings; a worker of Ray has others"
        sys.argv, source, file = argv, Path(argv[0]).read_bytes(), argv[0]
        main.__file__, first = file, str(Path(file).resolve().parent)
    if "-P" not in given:
        sys.path.insert(0, first)
    exec(compile(source, file, "exec"), main.__dict__)


def leave(status):
    """Ends this process without freeing all that the server has made, which takes longer than to fork."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    del sys.path[0]
    if (job := serve(*sys.argv[1:])) is not None:
        try:
            run(job)
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                raise
            leave(end.code or 0)
        leave(0)
