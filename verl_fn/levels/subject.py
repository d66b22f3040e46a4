"""The model under test, its data, and what the user asks for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import attrs

from verl_fn.backends.hf.config import ModelError, quiet, read_config, read_json, refused
from verl_fn.backends.hf.experts import experts_of
from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, SPECIALS, char_tokenizer
from verl_fn.benchmarks.tiny_models import random_folder, tiny_like
from verl_fn.data.tasks import TASKS
from verl_fn.errors import UsageError

TASK = "count"  # its prompts are plain strings that any tokenizer reads
DUMMY = "weights are random, so pretrained weights and their import were not tested"


@attrs.frozen
class Request:
    """What ``verl-fn levels`` is asked for; every process of a level reads it.

    Attributes:
        model: the folder or the file that the user named.
        folder: the model folder that the levels use.
        dummy: whether its weights are random.
        gpus: how many GPUs the levels may use; on CPUs, how many ranks.
        bridge: the checkout of Megatron-Bridge, or nothing for what is installed.
        engine: ``sampler`` or ``vllm``.
        ray: the address of a Ray cluster, ``local`` for one of the run's own, or nothing for this process.
        data: a folder with ``train.parquet`` and ``test.parquet``, or nothing for questions that the project makes.
        reward_model: a folder, or nothing for a rule.
        margin: by how much level 5 must raise the held-out reward.
        out: the folder with the logs and the report.
    """

    levels: tuple[int, ...]
    model: str
    folder: str
    dummy: bool
    device: str
    out: str
    gpus: int = 1
    features: tuple[str, ...] = ()
    bridge: str = ""
    engine: str = "sampler"
    ray: str = ""
    data: str = ""
    reward_model: str = ""
    steps: int = 20
    margin: float = 0.05
    seed: int = 0

    def write(self, file: Path) -> None:
        """Writes the request for the processes of the levels."""
        file.write_text(json.dumps(attrs.asdict(self), indent=1))

    @classmethod
    def read(cls, file: Path) -> Request:
        """Returns the request that ``write`` wrote."""
        saved = json.loads(file.read_text())
        return cls(**saved | {name: tuple(saved[name]) for name in ("levels", "features")})

    def alone(self) -> Request:
        """Returns this request for one process: with the embedded engine, and without Ray."""
        return attrs.evolve(self, ray="", engine="sampler")

    @property
    def experts(self) -> int:
        """How many experts a layer of the model has; 0 without experts, and if no model could be made."""
        return (experts_of(read_config(self.folder).get_text_config()) or 0) if self.folder else 0


def model_folder(model: str, out: Path, *, tiny: bool, device: str, engine: str) -> tuple[Path, bool]:
    """Returns the folder that levels use, and whether its weights are random.

    Args:
        model: a model folder, or a ``config.json``.
        out: where a model is made, if there are no weights.
        tiny: with tiny sizes.
        device: a model that is made for a CPU has fp32 weights.
        engine: tiny sizes are larger for vLLM, whose kernels do not take the smallest ones.

    Raises:
        UsageError: there is no such model, or a folder with weights was to be made tiny.
        ModelError: transformers makes no model of the config.
    """
    path = Path(model)
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise UsageError(f"--model {model}: there is no such folder or config.json; models are not downloaded")
    if path.is_dir() and any(path.glob("*.safetensors")):
        if tiny:
            raise UsageError(f"--tiny goes with a config, and {model} has weights; name {config}")
        return path.resolve(), False
    source = out / "config"
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(read_json(config)))
    wanted = read_config(source)
    wanted = tiny_like(wanted, vllm=engine == "vllm") if tiny else wanted
    folder = out / "model"
    tokenizer = char_tokenizer(_characters(wanted.get_text_config().vocab_size, config))
    tokenizer.chat_template = CHAT_TEMPLATE
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(wanted, name, getattr(tokenizer, name))
    if device == "cpu":
        wanted.dtype = "float32"
    with refused(f"transformers makes no model of {config}"), quiet():
        random_folder(wanted, folder)
        tokenizer.save_pretrained(folder)
    return folder.resolve(), True


def _characters(vocabulary: int, config: Path) -> str:
    """Returns as many characters as a model has tokens beside the special ones.

    The task's come first, then the chat template's line break and what the user's data may have.
    """
    needed = TASKS[TASK].alphabet + "\n"
    if (count := vocabulary - len(SPECIALS)) < len(needed):
        raise ModelError(f"{config} has a vocabulary of {vocabulary}, too few for the characters of {TASK}")
    # Latin, punctuation and other signs; the private planes of Unicode fill what is left.
    others = (chr(code) for first, last in ((0x20, 0x2FFF), (0xE000, 0xF8FF), (0xAC00, 0xD7A3), (0xF0000, 0x10FFFD))
              for code in range(first, last + 1))  # fmt: skip
    usual = (char for char in others if (char.isprintable() or char >= "\uac00") and char not in needed)
    return needed + "".join(itertools.islice(usual, count - len(needed)))
