"""The locks fit what pyproject.toml declares, and name no index."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ("dev.txt", "vllm.txt")


def pins(name: str) -> dict[str, Version]:
    """Returns the locked version of each distribution."""
    lines = re.findall(r"^([\w.-]+)==([^ ;\\\n]+)", (ROOT / "locks" / name).read_text(), re.MULTILINE)
    return {distribution.lower(): Version(version) for distribution, version in lines}


def unfit(requirements: list[str], locked: dict[str, Version]) -> list[str]:
    """Returns the requirements without an upper bound, or whose lower bound is not the locked version."""
    wrong = []
    for requirement in map(Requirement, requirements):
        bounds = {bound.operator: Version(bound.version) for bound in requirement.specifier}
        if "<" not in bounds or bounds.get(">=") != locked.get(requirement.name.lower()):
            wrong.append(str(requirement))
    return wrong


@pytest.mark.parametrize("lock", LOCKS)
def test_ranges_start_at_what_is_tested(lock):
    extras = ("vllm",) if lock == "vllm.txt" else ("datasets", "math", "reasoning-gym", "smollm2")
    optional = [one for name in ("lora", *extras) for one in PROJECT["optional-dependencies"][name]]
    assert not unfit([*PROJECT["dependencies"], *optional], pins(lock))


def test_verifiers_is_locked_in_its_range():
    for requirement in map(Requirement, PROJECT["optional-dependencies"]["verifiers"]):
        assert str(pins("verifiers.txt")[requirement.name]) in requirement.specifier


def test_megatron_is_locked_as_its_extra_and_its_errors_say():
    from verl_fn.backends.megatron.importing import INSTALL

    locked = pins("megatron.txt")
    assert not unfit([text.partition(";")[0] for text in PROJECT["optional-dependencies"]["megatron"]], locked)
    told = {word for word in INSTALL.split() if "==" in word}
    assert {f"{name}=={version}" for name, version in locked.items()} == told


def test_torchvision_is_the_one_of_vllm_and_of_its_error():
    from verl_fn.backends.vllm.arguments import TORCHVISION

    assert str(pins("torchvision.txt")["torchvision"]) == str(pins("vllm.txt")["torchvision"]) == TORCHVISION


def test_an_unfit_range_is_seen():
    ranges = ["attrs>=26.1.0,<27", "numpy>=2.0,<3", "rich>=15.0.0", "ray"]
    locked = {"attrs": Version("26.1.0"), "numpy": Version("2.3.5"), "rich": Version("15.0.0")}
    assert unfit(ranges, locked) == ["numpy<3,>=2.0", "rich>=15.0.0", "ray"]


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_hold_the_constraints(lock):
    assert pins("constraints.txt").items() <= pins(lock).items()


@pytest.mark.parametrize("lock", [*LOCKS, "megatron.txt", "torchvision.txt", "verifiers.txt"])
def test_locks_have_hashes_and_no_address(lock):
    text = (ROOT / "locks" / lock).read_text()
    assert "://" not in text and "--index" not in text and "--find-links" not in text
    unhashed = re.findall(r"^[\w.-]+==[^\\\n]*$", text, re.MULTILINE)
    assert not unhashed
