"""Reading of verl's settings: scripts, YAML files and Hydra's ``key=value`` overrides, with references resolved."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from verl_fn.config.load import flat
from verl_fn.config.options import ConfigError, home
from verl_fn.errors import raised_as

from .keys import PPO_DEFAULTS, SFT_DEFAULTS

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_LAUNCHER = re.compile(r"--(nproc[-_]per[-_]node|nnodes)")
# Modules with the trainers of ppo_trainer.yaml and of sft_trainer_engine.yaml.
_PPO_MODULES = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "verl.trainer.main_ppo_v0",
                "recipe.dapo.main_dapo")  # fmt: skip
_SFT_MODULES = ("verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray", "verl.trainer.fsdp_sft_trainer")
# verl's own files; all of them have the same keys and defaults but for the engine.
_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer",
            "dapo_megatron_trainer")  # fmt: skip
_FOLDERS = ("/.", "/config")
_ENGINES = {"dp": "fsdp", "fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
# Programs that only print; a script may compute settings with them.
_HARMLESS = ("basename", "bc", "cat", "cut", "date", "dirname", "expr", "head", "hostname", "nproc", "realpath",
             "seq", "sort", "tail", "tr", "uname", "wc", "whoami")  # fmt: skip
# Bash runs in its restricted mode: no program outside of PATH starts, no file is written, and PATH stays as it is. So
# a trainer is a command that is not found. The functions stand for what restricted mode forbids, but scripts need.
# In place of what a program would print that does not start, its command goes on between the bytes 2 and 3, through
# filters too, so that no setting is made of nothing. Whether something imports, whether a program is there, and how
# one ends is asked without printing.
_PRELUDE = r"""
exec {SCREEN}>&1
command_not_found_handle() {
    local word before=
    for word in "$@"; do
        case $before:$word in
            -m:verl.*|-m:recipe.*|*:main_*.py|*:*/main_*.py|*:*sft_trainer*.py)
                # These hand on words that they read.
                case ${1##*/} in xargs|parallel) printf '\4%s\0\0' "$*" >&"$LAUNCHES"; return 1;; esac
                printf '%s\0' "$@" "" >&"$LAUNCHES"
                return 0;;
        esac
        before=$word
    done
    case ${1##*/}:$* in
        python*:*print*|python*:*write*) ;;
        python*" -c "*) printf '\4%s\0\0' "$*" >&"$LAUNCHES"; return 1;;
    esac
    if [ ! /dev/fd/1 -ef "/dev/fd/$SCREEN" ]; then
        [ ! -p /dev/stdin ] || mapfile  # or what writes to it would fail
        printf '\4%s\0\0' "$*" >&"$LAUNCHES"
        local said=$*  # without spaces, at which the shell would make several words of it
        printf '\2%s\3\n' "${said//[[:space:]]/$'\1'}"
        return 0
    fi
    printf '\5%s\0\0' "$*" >&"$LAUNCHES"
    case ${1##*/} in python*) return 1;; esac
}
passed() {
    local text word
    for word in "${@:2}"; do if [ -e "$word" ]; then command "$@"; return; fi; done
    if [ ! -p /dev/stdin ]; then command "$@"; return; fi
    IFS= read -r -d '' text
    case $text in *$'\2'*) printf '%s' "$text";; *) printf '%s' "$text" | command "$@";; esac
}
sought() {
    local word
    for word in "${@:2}"; do
        case $word in
            -*|python*) ;;
            *) [ "$(builtin type -t "$word")" ] || printf '\4%s\0\0' "$*" >&"$LAUNCHES";;
        esac
    done
}
command() { case $1 in -[vV]) sought command "$@";; esac; builtin command "$@"; }
type() { sought type "$@"; builtin type "$@"; }
hash() { sought hash "$@"; builtin hash "$@"; }
which() { sought which "$@"; printf '%s\n' "${!#}"; }
for program in bc cut head sort tail tr wc; do eval "$program() { passed $program \"\$@\"; }"; done
tee() { mapfile; }
cd() { local to=${!#}; case $to in /*) ;; *) to=$PWD/$to;; esac; PWD=$(realpath -m -- "$to"); }
pwd() { printf '%s\n' "$PWD"; }
source() {
    local file=$1
    case $file in
        /etc/*|/opt/*|/usr/*|*/activate|*conda*|*/.bashrc|*/.*profile) return 0;;
        /*) ;;
        *) file=$PWD/$file;;
    esac
    shift
    if [ -r "$file" ]; then eval "$(<"$file")"; fi
}
.() { source "$@"; }
ulimit() { :; }
exec() { [ $# = 0 ] || { "$@"; exit; }; }
"""
_NOT_RUN = re.compile("\2([^\3]*)\3")
_SETTING = re.compile(r"[\4\5][+~]*\w+(\.[\w@-]+)+=")
# A word without a dot may be an argument of the script itself.
_OVERRIDE = re.compile(r"~\w|\++\w+[\w.@-]*=|\w+(\.[\w@-]+)+=|model_engine=")
# Commands that prepare a machine: scripts hardly ask whether they succeed.
_SETS_UP = re.compile(
    r"(mkdir|rm|cp|mv|ln|chmod|sleep|pkill|wget|curl|ray (start|stop)|(uv )?pip3? install|uv (sync|venv)|hf download"
    r"|huggingface-cli download|conda activate|wandb login)\b"
)
_TO_NOWHERE = re.compile(r"(?:[12&]?>>?\s*/dev/null)(?:\s*2>&1)?")
SECONDS = 60


@attrs.frozen
class Settings:
    """Settings of verl as they were written.

    Attributes:
        values: the value of each key that was set.
        sft: whether they are for ``sft_trainer``; otherwise they are for ``ppo_trainer``.
        engine: verl's engine of the chosen config files: ``fsdp``, ``megatron``, or another one as verl names it.
        module: the module of the trainer; empty if no command was given.
        words: the keys that words of a command line have set; all other keys are from files.
        not_run: commands of a script that are not run; what it does with their answers is not known.
        lost: lines of a script with settings that its trainer does not get.
    """

    values: Mapping[str, Any]
    sft: bool = False
    engine: str = "fsdp"
    module: str = ""
    words: frozenset[str] = frozenset()
    not_run: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def trainer_is_known(self) -> bool:
        """Returns whether the settings of the module's trainer are translated."""
        return self.module in ("", *_PPO_MODULES, *_SFT_MODULES)


def read_settings(words: Sequence[str]) -> Settings:
    """Reads a script of verl with its arguments, the words of a command line of verl, or YAML files and overrides.

    Words of a launcher (``python3 -m verl.trainer.main_ppo``, ``torchrun --nproc_per_node=8``) may stay. Later
    settings replace earlier ones. Settings behind the name of a script that does not hand on its arguments are the
    last ones.

    Args:
        words: as a shell hands them over: variables are replaced and quotes removed.

    Raises:
        ConfigError: a file cannot be read, a script starts no trainer, or a word is neither a file nor a setting.

    Example:
        >>> words = ["algorithm.adv_estimator=grpo", "+trainer.logger=['console']", "model_engine=megatron"]
        >>> read = read_settings(words)
        >>> read.values, read.engine
        ({'algorithm.adv_estimator': 'grpo', 'trainer.logger': ['console']}, 'megatron')
    """
    words = [word for word in words if word not in ("", "\\")]
    not_run: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    if words and words[0].endswith((".sh", ".bash")):
        script, *arguments = words
        words, not_run, lost = launch_of(script, arguments)
        # What a script without "$@" does not hand on to its trainer is meant for that all the same.
        words += [word for word in arguments if _OVERRIDE.match(word) and word not in words]
    launcher, module, words = _command(_known(words))
    if any(map(str.isspace, words)):
        raise ConfigError(
            "--from-verl: a word is a space, as of a backslash with a space or a comment behind it: the command ends "
            "there, and the settings on later lines are lost; let each line but the last end with its backslash"
        )
    words, chosen = _options(words)
    values: dict[str, Any] = {}
    given: set[str] = set()
    for word in words:
        key, equals, string = word.partition("=")
        if word.startswith("~") and "/" not in key:
            _remove(key[1:], values)
        elif not equals:
            values |= _file(word, chosen)
        else:
            key = key.lstrip("+")
            inner = _value(key, string)
            table = flat({key: inner}) if isinstance(inner, Mapping) and inner else {key: inner}
            values |= table
            given |= table.keys()
    chosen |= {key: values.pop(key) for key in list(values) if _is_group(key, values[key])}
    values |= _ranks(launcher)
    tables = ("optim.", "engine.", "model.", "checkpoint.")
    sft = module in _SFT_MODULES or (not module and any(key.startswith(tables) for key in values))
    sft = sft or str(chosen.get("config-name", "")).startswith("sft_trainer")
    defaults = SFT_DEFAULTS if sft else PPO_DEFAULTS
    return Settings(_resolved(values, defaults), sft, _engine(chosen), module, frozenset(given), not_run, lost)


def _remove(key: str, values: dict[str, Any]) -> None:
    """Removes a key, or the keys of a table.

    Raises:
        ConfigError: only verl's defaults give it a value.
    """
    removed = {name for name in (*values, *SFT_DEFAULTS, *PPO_DEFAULTS) if f"{name}.".startswith(f"{key}.")}
    if removed.isdisjoint(values) and removed:
        raise ConfigError(
            f"--from-verl: ~{key} removes a default of verl's; set the value that verl takes without it"
        )
    for name in removed & values.keys():
        del values[name]


def _known(words: Sequence[str]) -> list[str]:
    """Returns the words that need no program that was not started; other words give these settings later values.

    Of a launcher's words only the numbers of ranks count.

    Raises:
        ConfigError: the last value of a setting needs one.
    """
    first = len(words) - len(_command(words)[2])
    counts = [
        place for place in range(1, first) if _LAUNCHER.fullmatch(words[place - 1]) or _LAUNCHER.match(words[place])
    ]
    last = {word.partition("=")[0].lstrip("+"): word for word in (*map(words.__getitem__, counts), *words[first:])}
    for key, word in last.items():
        if asked := _NOT_RUN.search(word):
            raise ConfigError(
                f"--from-verl: the script computes {_NOT_RUN.sub('...', key)} with {_asked(asked[0])!r:.80}, which "
                "is not run here; write the value behind the script's name"
            )
    return [word for word in words if not _NOT_RUN.search(word)]


def _asked(command: str) -> str:
    """Returns a command with the commands that make its words, as a script has them."""
    return _NOT_RUN.sub(lambda inner: inner[1].replace("\1", " "), command)


def _command(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Splits the words of a command into the launcher's, the trainer's module, and its arguments."""
    if "-m" in words:
        start = list(words).index("-m")
        return list(words[:start]), words[start + 1] if start + 1 < len(words) else "", list(words[start + 2 :])
    for number, word in enumerate(words):
        if word.endswith(".py") and "=" not in word:
            parts = Path(word).with_suffix("").parts
            starts = [place for place, part in enumerate(parts) if part in ("verl", "recipe")]
            return list(words[:number]), ".".join(parts[starts[-1] :] if starts else parts), list(words[number + 1 :])
    return [], "", list(words)


def _options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the words without Hydra's options, and what the options choose; a config of the user's becomes a word.

    Raises:
        ConfigError: the chosen config is not one of verl's, and there is no such file.
    """
    short, chosen, rest = {"-cn": "--config-name", "-cp": "--config-path"}, {}, []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        name = short.get(name, name)
        if not name.startswith("--"):
            rest.append(word)
        elif not equals and name in ("--config-name", "--config-path", "--config-dir"):
            chosen[name[2:]] = next(left, "")
        else:
            chosen[name[2:]] = value
    config = str(chosen.get("config-name", "")).removesuffix(".yaml")
    folder = next((chosen[name] for name in ("config-path", "config-dir") if name in chosen), "" if config else None)
    if folder is not None:
        # A file of that name replaces verl's own, which a relative folder of verl's examples names.
        names = [config] if config else _CONFIGS
        file = next((file for name in names if (file := Path(home(folder), f"{name}.yaml")).is_file()), None)
        if file is not None and (folder or config not in _CONFIGS):
            rest.insert(0, str(file))
        # Without a folder, verl takes its own one.
        elif (config and config not in _CONFIGS) or (folder and not f"/{folder}".rstrip("/").endswith(_FOLDERS)):
            own = "" if config in ("", *_CONFIGS) else f"--config-name={config} is none of verl's own configs, and "
            raise ConfigError(
                f"--from-verl: {own}there is no {Path(folder, f'{config or names[0]}.yaml')}; give --config-path as "
                "an absolute path, or the YAML file itself in its place"
            )
    return rest, chosen


def _is_group(key: str, value: Any) -> bool:
    """Returns whether a setting chooses the engine's file of a group, such as ``model_engine=megatron``."""
    groups = ("model_engine", "engine", "optim")
    return isinstance(value, str) and (
        key in groups or key.startswith("actor@") or (key, value) == ("model", "hf_model")
    )


def _engine(chosen: Mapping[str, Any]) -> str:
    names = [str(chosen[key]) for key in chosen if key.partition("@")[0] in ("model_engine", "engine")]
    names += [str(value).rpartition("_")[0] for key, value in chosen.items() if key.startswith("actor@")]
    if names:
        return _ENGINES.get(names[-1], names[-1])
    return "megatron" if "megatron" in str(chosen.get("config-name", "")) else "fsdp"


# A string in quotes, or a key of a table without a space behind its colon, as Hydra writes it.
_COLON = re.compile(r"""("[^"]*"|'[^']*')|([{,]\s*[^\s:,{}\[\]'"]+):(?!\s|//)""")
# What stands in words for the signs of references, to which YAML would give another meaning.
_STAND_INS = str.maketrans("{}:,", "\ue000\ue001\ue002\ue003")
_SIGNS = str.maketrans("\ue000\ue001\ue002\ue003", "{}:,")


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it: ``1e-6`` is a number, dates are strings; and, as in Hydra's words, so is ``on``."""

    def construct_scalar(self, node: Any) -> Any:
        """Returns a scalar with its references as they were written."""
        return super().construct_scalar(node).translate(_SIGNS)


class _FileLoader(_Loader):
    """The YAML of files, in which OmegaConf refuses a table that has a key twice; Hydra's words may have such."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Reads a table before others are merged into it, whose keys it may repeat."""
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if key.tag == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG]
        if twice := [key for key, _ in node.value if names.count(key.value) > 1]:
            raise yaml.MarkedYAMLError(None, None, f"it has the key {twice[-1].value} twice", twice[-1].start_mark)
        return node


_RESOLVERS = {
    "bool": ("true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(0|[1-9][\d_]*)", "-+0123456789"),
    "float": (r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.?(inf|Inf)|\.?(nan|NaN)", "-+.0123456789inN"),
    "null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": ("<<", "<"),
}
_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _RESOLVERS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _file(name: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a YAML file, and of the files beside it that its ``defaults`` name.

    Args:
        chosen: gets the configs of verl's own that it is composed of.

    Raises:
        ConfigError: a file cannot be read, or is composed of something else.
    """
    path = Path(home(name))
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--from-verl: {name!r} is neither a setting key=value nor a YAML file or a script (.sh)")
    try:
        table = yaml.load(path.read_text(encoding="utf-8"), _FileLoader)
    except OSError as error:
        raise ConfigError(f"--from-verl: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--from-verl: {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"--from-verl: {path} has no table of keys")
    parts = table.pop("defaults", None) or []
    parts = parts if isinstance(parts, list) else [parts]
    own = {key: value for key, value in flat(_with_names(table)).items() if value != "???"}
    values: dict[str, Any] = {}
    for part in [*parts, *["_self_"] * ("_self_" not in parts)]:
        if part == "_self_":
            values |= own
        elif (beside := path.parent / f"{str(part).removesuffix('.yaml')}.yaml") != path and beside.is_file():
            values |= _file(str(beside), chosen)
        elif str(part).removesuffix(".yaml") in _CONFIGS:
            chosen["config-name"] = part
        else:
            _chosen_by(part, path, chosen)
    return values


def _chosen_by(part: Any, path: Path, chosen: dict[str, Any]) -> None:
    """Takes an entry of a file's ``defaults`` that names the file of a group, such as ``model_engine: megatron``.

    Raises:
        ConfigError: it is the user's own file, or there is none of that name.
    """
    for group, option in part.items() if isinstance(part, Mapping) else [(part, None)]:
        name = str(group).removeprefix("override ").removeprefix("optional ").strip().lstrip("/")
        own = path.parent / name.partition("@")[0] / f"{option}.yaml"
        if option is None or own.is_file():
            raise ConfigError(
                f"--from-verl: {path} is composed of {own if option else group}, which is not read; write its "
                "settings into the file"
            )
        if _is_group(name, option):
            chosen[name] = option


def _with_names(table: Mapping[Any, Any]) -> dict[str, Any]:
    """Makes every key a string."""
    return {str(key): _with_names(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _value(key: str, string: str) -> Any:
    if re.search(r"\$\w", string):
        raise ConfigError(f"--from-verl: {key} has a shell variable in {string!r}; let the shell replace it first")
    if not string.lstrip().startswith(("{", "[", "'", '"')):
        # Hydra reads an escape, such as of the equals sign in a path, and no tables.
        plain = re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", string)
        if not string or plain != string or re.search(r":\s|^- ", string):
            return plain
    string = _REFERENCE.sub(lambda found: found[0].translate(_STAND_INS), string)
    if "{" in string:
        string = _COLON.sub(lambda found: found[1] or f"{found[2]}: ", string)
    try:
        value = yaml.load(string, _Loader)
        # Lists in quotes are strings to Hydra, and lists to the classes that verl makes of them.
        again = isinstance(value, str) and value.startswith("[")
        return yaml.load(value, _Loader) if again else value
    except yaml.YAMLError:
        return string.translate(_SIGNS)


def _ranks(launcher: Sequence[str]) -> dict[str, int]:
    """Returns the keys of verl's trainer that torchrun's options stand for."""
    ranks = {}
    for place, word in enumerate(launcher):
        name, equals, value = word.partition("=")
        if match := _LAUNCHER.fullmatch(name):
            value = value if equals else "".join(launcher[place + 1 : place + 2])
            if value.isdigit():
                ranks["trainer.nnodes" if match[1] == "nnodes" else "trainer.n_gpus_per_node"] = int(value)
    return ranks


def _resolved(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces OmegaConf's references by the values of the keys that they name.

    Raises:
        ConfigError: one names no key, no variable of the environment, or a function of OmegaConf's that is not known.
    """
    known = {**defaults, **values}

    def replaced(key: str, value: Any, depth: int = 0) -> Any:
        if isinstance(value, list):
            return [replaced(key, item, depth) for item in value]
        if not isinstance(value, str) or depth > 20 or not (match := _REFERENCE.search(value)):
            return value
        inner = _referred(key, match[1], known)
        if match[0] == value:
            return replaced(key, inner, depth + 1)
        return replaced(key, value[: match.start()] + str(inner) + value[match.end() :], depth + 1)

    # Hydra's own keys have no effect here.
    return {key: value if key.startswith("hydra.") else replaced(key, value) for key, value in values.items()}


def _referred(key: str, reference: str, values: Mapping[str, Any]) -> Any:
    resolver, colon, rest = reference.partition(":")
    name, comma, default = (rest if colon else reference).partition(",")
    name = name.strip()
    if resolver == "now":
        return time.strftime(rest)
    if resolver == "oc.env" and (comma or name in os.environ):
        return _value(key, os.environ.get(name, default))
    dots = len(name) - len(name.lstrip("."))
    if dots:
        name = ".".join([*key.split(".")[:-dots], name[dots:]])
    if resolver == "oc.select" or not colon:
        if name in values:
            return values[name]
        if colon:
            return _value(key, default.strip()) if default.strip() else None
    raise ConfigError(
        f"--from-verl: {key} has ${{{reference}}}, which stands for nothing here; write the value itself"
    )


def launch_of(script: str, arguments: Sequence[str] = ()) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    """Returns the words with which a script starts verl's trainer, the programs not run, and lost settings.

    Settings are lost if a command with a trainer ends above them, at a comment for example.

    Restricted bash runs the script, and starts no program but a few that only print: variables, arrays, functions,
    arithmetic and ``$@`` are what they would be in the run. Variables of the environment count as they do there.

    Raises:
        ConfigError: there is no such file or no bash, or the script starts no trainer, or several.
    """
    path = Path(home(script)).absolute()
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("--from-verl: reading a script needs bash; give the words of its command in its place")
    with raised_as(ConfigError, f"--from-verl: {path} cannot be read", OSError, ValueError):
        text = path.read_text(encoding="utf-8")
    said, commands = _commands(bash, path, text, arguments)
    lost: list[str] = []
    for before, one in itertools.pairwise(commands):
        if (before in lost or _starts([before])) and _SETTING.match(one):
            lost.append(one)
    others = [one for one in dict.fromkeys(commands) if one not in lost]
    asked, ran = ([one[1:] for one in others if one[:1] == kind] for kind in "\4\5")
    distinct = _starts(commands)
    if len(distinct) == 1:
        asked += [one for one in ran if not _SETS_UP.match(one)]
        return distinct[0].split("\0"), tuple(map(_asked, asked)), tuple(_asked(one[1:]) for one in lost)
    why = f"starts verl {len(distinct)} times with different settings" if distinct else "starts no trainer of verl"
    last = f" (it ended with: {said[-1].strip()})" if said and not distinct else ""
    if asked and not distinct:
        last += f"; it asks {asked[0]!r:.200}, which is not run here"
    elif ran and not distinct:
        last += f"; of what is not run here, it calls {ran[-1]!r:.200} last"
    raise ConfigError(
        f"--from-verl: {path} {why}{last}; set what it asks for, or put 'verl-fn config --from-verl' in front of the "
        "command in it and run it"
    )


def _starts(commands: Sequence[str]) -> list[str]:
    """Returns the different commands that start a trainer."""
    return [one for one in dict.fromkeys(commands) if one[:1] not in ("\4", "\5")]


def _commands(bash: str, path: Path, text: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns what a script prints, and the commands that it gives to trainers and to programs that are not run.

    Commands begin with the byte 4 if the script uses what the program would say, and with 5 if only its exit status.

    Raises:
        ConfigError: it does not end.
    """
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
    said = [line.replace(str(copy), path.name) for line in (done.stderr + done.stdout).splitlines()]
    return [line for line in said if not line.startswith("+")], commands
