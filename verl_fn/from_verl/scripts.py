"""Reading of verl's launch scripts: bash itself expands them, without starting what they start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl_fn.config.options import ConfigError, home

# Programs that only print; a script may compute settings with them.
_HARMLESS = ("basename", "bc", "cat", "cut", "date", "dirname", "expr", "head", "hostname", "nproc", "realpath",
             "seq", "sort", "tail", "tr", "uname", "wc", "whoami")  # fmt: skip
# Bash runs in its restricted mode: no program outside of PATH starts, no file is written, and PATH stays as it is. So
# a trainer is a command that is not found. The functions stand for what restricted mode forbids, but scripts need.
_PRELUDE = r"""
command_not_found_handle() {
    local word before=
    for word in "$@"; do
        case $before:$word in
            -m:verl.*|-m:recipe.*|*:main_*.py|*:*/main_*.py|*:*sft_trainer*.py)
                printf '%s\0' "$@" "" >&"$LAUNCHES"
                return 0;;
        esac
        before=$word
    done
    case ${1##*/} in python*) return 1;; esac
}
tee() { mapfile; }
sed() { cat; }
cd() { local to=${!#}; case $to in /*) ;; *) to=$PWD/$to;; esac; PWD=$(realpath -m -- "$to"); }
pwd() { printf '%s\n' "$PWD"; }
source() { :; }
.() { :; }
ulimit() { :; }
exec() { :; }
"""
_TO_NOWHERE = re.compile(r"(?:[12&]?>>?\s*/dev/null)(?:\s*2>&1)?")
SECONDS = 60


def launch_of(script: str, arguments: Sequence[str] = ()) -> list[str]:
    """Returns the words of the command with which a script starts verl's trainer.

    Restricted bash runs the script, and starts no program but a few that only print: variables, arrays, functions,
    arithmetic and ``$@`` are what they would be in the run. Variables of the environment count as they do there.

    Args:
        script: a bash script.
        arguments: its arguments.

    Raises:
        ConfigError: there is no such file or no bash, or the script starts no trainer, or several.
    """
    path = Path(home(script)).absolute()
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("--from-verl: reading a script needs bash; give the words of its command in its place")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from-verl: {path} cannot be read: {error}") from error
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as launches:
        folder = Path(name)
        programs = folder / "bin"
        programs.mkdir()
        for program in _HARMLESS:
            if found := shutil.which(program):
                (programs / program).symlink_to(found)
        (folder / "prelude").write_text(_PRELUDE)
        copy = folder / path.name
        copy.write_text(_TO_NOWHERE.sub("", text).replace("${BASH_SOURCE[0]}", str(path)).replace("$0", str(path)))
        number = launches.fileno()
        environment = {
            **os.environ,
            "PATH": str(programs),
            "BASH_ENV": str(folder / "prelude"),
            "LAUNCHES": str(number),
        }
        try:
            done = subprocess.run(
                [bash, "-r", str(copy), *arguments], env=environment, capture_output=True, text=True,
                stdin=subprocess.DEVNULL, timeout=SECONDS, pass_fds=[number], errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"--from-verl: {path} did not end in {SECONDS} s") from error
        launches.seek(0)
        commands = launches.read().decode(errors="replace").split("\0\0")[:-1]
    distinct = list(dict.fromkeys(commands))
    if len(distinct) == 1:
        return distinct[0].split("\0")
    said = [line.replace(str(copy), path.name) for line in (done.stderr + done.stdout).splitlines()]
    said = [line for line in said if not line.startswith("+")]
    why = f"starts verl {len(distinct)} times with different settings" if distinct else "starts no trainer of verl"
    last = f" (it ended with: {said[-1].strip()})" if said and not distinct else ""
    raise ConfigError(
        f"--from-verl: {path} {why}{last}; set what it asks for, or put 'verl-fn config --from-verl' in front of the "
        "command in it and run it"
    )
