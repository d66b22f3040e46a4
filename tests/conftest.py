"""Strict surroundings for every test, the tiny models that many share, and which tests run in one worker."""

import contextlib
import gc
import importlib.util
import json
import multiprocessing.spawn
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests make calls fail on purpose.
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
# Ray gives its actors the priority 15, at which they would wait for all that other workers of pytest-xdist do.
os.environ.setdefault("RAY_worker_niceness", "0")
# Actors that were stopped do not end when Ray asks them to, and then it kills them.
os.environ.setdefault("RAY_kill_worker_timeout_milliseconds", "1000")
# Ray would start Pythons for actors that take a warm one (the fixture ``warm_ray``) instead.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("RAY_enable_worker_prestart", "0")
# Tiny models only lose time to a second thread, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from shared_fits import FOLDER
from warm_python import YOUNG, warm_python

# Files whose tests share processes, which a fixture starts once in each worker of pytest-xdist. Tests over Ray wait a
# lot, so they are two units, with a cluster each.
SHARED = {
    "Ray": [
        *("batches_benchmark", "clusters", "environments", "groups", "private_ray", "ray_driver", "serialization"),
        *("weight_sync_benchmark",),
    ],
    "Ray, with faults": ["failures", "overlap", "restarts", "turns", "updates_in_flight"],
    "Megatron": [
        *("levels", "megatron", "megatron_bridges", "megatron_experts", "megatron_fsdp", "megatron_images"),
        *("megatron_offload", "megatron_optimizer", "megatron_publication"),
    ],
    "ranks": ["checkpoints", "fsdp", "loading", "rank_checks", "vision_ranks", "weight_sync"],
}
VLLM = Path(__file__).with_name("vllm_imports.py")
# What takes longest starts first, so that all workers end at about the same time.
FIRST = [
    *("Megatron", "ranks", "Ray, with faults", "Ray", "megatron_families", "mutants", "backend_laws", "served_model"),
    *("vllm", "vllm_images", "torchrun", "memory", "exactness", "verifiers", "smollm2", "damage", "ahead"),
    *("step_benchmark", "lora", "lora_run", "report", "config_fuzz", "sampler", "calls", "exact_run", "check_run"),
    *("damaged_models", "replay", "docs", "interrupt", "hostile_rewards", "bad_input", "damaged_files"),
]


def pytest_configure(config):
    if FOLDER not in os.environ:
        fits = tempfile.TemporaryDirectory(prefix="fits_")
        config.add_cleanup(fits.cleanup)
        os.environ[FOLDER] = fits.name
    if getattr(config.option, "numprocesses", None):  # this process only starts workers
        start_warm_pythons(config)
        return
    gc.disable()
    # A worker's own executable is a warm Python that has imported the tests.
    sys.executable = os.environ.get("TESTS_PYTHON", sys.executable)
    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def start_warm_pythons(config):
    """Starts one warm Python for all workers, and from it another, which collects the tests and forks the workers."""
    os.environ["TESTS_PYTHON"], os.environ["TESTS"] = sys.executable, json.dumps(config.args)
    started = contextlib.ExitStack()
    config.add_cleanup(started.close)
    os.environ["WARM_PYTHON"] = warm = started.enter_context(warm_python())
    os.environ["VLLM_PYTHON"] = started.enter_context(warm_python(VLLM, python=warm))
    if config.args_source is config.ArgsSource.TESTPATHS and importlib.util.find_spec("vllm"):
        # All workers wait while one core collects the tests, so another one imports vLLM.
        config.add_cleanup(subprocess.Popen([os.environ["VLLM_PYTHON"], "-c", ""]).wait)
    collected = started.enter_context(warm_python(Path(__file__).with_name("collected.py"), python=warm))
    config.option.tx = [f"popen//python={collected}" for _ in config.option.tx]


def unit(nodeid):
    """The tests that run in one worker: those of a file, or of all files that share processes."""
    file = nodeid.partition("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py")
    return next((name for name, files in SHARED.items() if file in files), file)


def pytest_collection_finish(session):
    # What is imported by now stays; the collector would look through it again and again, as while it was imported.
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG)


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(unit(item.nodeid), len(FIRST)))


# pytest-xdist's own groups (--dist=loadgroup) are ignored under pytest 9.2: pytest-dev/pytest-xdist issue 1386.
# With its --dist=loadscope, each of four workers would start a Ray cluster, ranks and Megatron for a few files.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit(nodeid)

        def remove_node(self, node):
            # If a worker dies, others get its units. One whose tests are all done would keep them waiting forever.
            left = self.assigned_work[node]
            self.assigned_work[node] = {name: tests for name, tests in left.items() if not all(tests.values())}
            return super().remove_node(node)

    return Units(config, log)


@pytest.fixture(scope="session")
def warm():
    """The path of a Python whose imports are done. multiprocessing takes it too, from here on."""
    before = multiprocessing.spawn.get_executable()
    shared = os.environ.get("WARM_PYTHON")
    with contextlib.nullcontext(shared) if shared else warm_python() as executable:
        multiprocessing.spawn.set_executable(executable)
        yield executable
        multiprocessing.spawn.set_executable(before)


@pytest.fixture(scope="session")
def vllm_python(warm):
    """The path of a warm Python that has imported vLLM, too."""
    shared = os.environ.get("VLLM_PYTHON")
    with contextlib.nullcontext(shared) if shared else warm_python(VLLM, python=warm) as executable:
        yield executable


@pytest.fixture(scope="session")
def warm_raylet(warm):
    """The path of a warm Python, with which Ray also sets up its workers (``warm_client.py``)."""
    from ray._private import services

    start = services.start_raylet

    def start_raylet(*args, **options):
        with mock.patch.object(sys, "executable", warm):
            return start(*args, **options)

    with mock.patch.object(services, "start_raylet", start_raylet):
        yield warm


@pytest.fixture(scope="session")
def warm_ray(warm_raylet, tmp_path_factory):
    """The setting of a run whose Ray actors are forked from the warm Python."""
    file = tmp_path_factory.mktemp("warm_ray") / "env.yaml"
    file.write_text(f"py_executable: {warm_raylet}\n")
    return f"ray.runtime_env={file}"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A Qwen3 folder of 0.02 M parameters with the alphabet of ``reverse``."""
    from verl_fn.backends.hf.new_model import new_model

    return new_model(tmp_path_factory.mktemp("tiny"), chars="abcdefgh>", hidden_size=32, max_position_embeddings=256)
