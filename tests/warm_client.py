"""The executable of a warm Python: it asks the server for a process and stands for that until it ends.

Each process of a test starts one, so it imports little.
"""

import array
import marshal
import os
import signal
import socket
import sys

# Read when Python starts or these modules are imported.
SETTINGS = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
# Scripts of Ray that end where their parent is not the one that started them.
WATCH_THEIR_PARENT = ("ray/dashboard/agent.py", "runtime_env/agent/main.py")
# The script by which Ray becomes the Python of a worker.
SETS_UP = "ray/_private/workers/setup_worker.py"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def settings(environment=os.environ):
    return [environment.get(name) for name in SETTINGS]


def options(argv):
    """Returns the options that forked processes obey, and the arguments after them."""
    count = next((i for i, word in enumerate(argv) if word not in ("-u", "-B", "-P")), len(argv))
    return argv[:count], argv[count:]


def ask(place, python, expected, argv):
    """Asks for a process with these arguments, or becomes an ordinary Python if the server cannot obey them."""
    _, command = options(argv)
    if command and command[0].endswith(SETS_UP):
        set_up(command[1:])
    known = bool(command) and (command[0] in ("-c", "-m") or not command[0].startswith("-"))
    if not known or command[0].endswith(WATCH_THEIR_PARENT) or repr(settings()) != expected:
        os.execv(python, [python, *argv])
    umask = os.umask(0)
    os.umask(umask)
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    request = {
        "argv": argv, "environment": dict(os.environ), "folder": os.getcwd(), "umask": umask, "files": files,
        "executable": os.path.join(os.path.dirname(place), "python"),
    }  # fmt: skip
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    text = marshal.dumps(request)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]

    def forward(number, frame):
        try:
            connection.sendall(bytes([number]))
        except OSError:  # the process has ended
            return

    for number in FORWARDED:
        signal.signal(number, forward)
    connection.sendmsg([len(text).to_bytes(8, sys.byteorder)], rights)
    connection.sendall(text)
    for number in files:
        if number > 2:
            os.close(number)
    answer = connection.recv(4)
    status = int.from_bytes(answer, sys.byteorder, signed=True) if answer else 1
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def set_up(argv):
    """Becomes a worker's Python as Ray's script does, but without importing Ray; returns if the script does more."""
    import json

    asked, language = "--serialized-runtime-env-context=", "--language="
    context = json.loads(next((word for word in argv if word.startswith(asked)), asked + "{}")[len(asked) :])
    python = context.pop("py_executable", None)
    if python and not any(context.values()) and language + "PYTHON" in argv:
        os.execv(python, [python, *(word for word in argv if not word.startswith((asked, language)))])


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    ask(*sys.argv[1:4], sys.argv[4:])
