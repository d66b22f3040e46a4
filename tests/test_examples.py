"""The examples do what they say, on small settings."""

import importlib.util
from pathlib import Path

import pytest

from verl_fn.testing import check_advantage, check_loss

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_custom_algorithm_learns():
    scores = load("custom_algorithm").main(steps=12)
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.03


def test_the_parts_of_the_custom_algorithm_obey_the_laws():
    example = load("custom_algorithm")
    check_loss(example.imitate)
    check_advantage(example.best_of_group)


def test_updates_compare_and_nothing_is_mutated():
    tables = load("compare_updates").main(rows=2)
    kl, rows = tables["with 0.1 * KL"], tables["seq-mean-token-mean"]
    assert set(kl) == set(rows) and len(kl) > 10
    for name, (cosine, distance, cosine_after, distance_after) in kl.items():
        assert 0.9 < cosine <= 1.0001 and 0.0 < distance < rows[name][1], name
        assert cosine_after > 0.9 and distance_after > 0.0, name
    for table in tables.values():
        distances = [entry[1] for entry in table.values()]
        assert distances == sorted(distances, reverse=True)


def test_the_example_of_tests_passes():
    assert pytest.main(["-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_custom_loss.py")]) == 0


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_gradients_by_row_and_the_predicted_change():
    scale, gap, predicted, actual = load("gradients_by_row").main().values()
    assert 1.0 < scale < 1000.0 and gap < 1e-6
    assert predicted < 0.0 and abs(actual - predicted) < 0.2 * abs(predicted)
