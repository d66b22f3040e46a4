"""Fields of Megatron-Bridge's provider that a user sets."""

from dataclasses import dataclass

import pytest

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.megatron.fidelity import checked


@dataclass
class Provider:
    """Stands for one of Bridge's."""

    apply_rope_fusion: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_router_load_balancing_type: str = "aux_loss"
    moe_input_jitter_eps: float | None = None
    moe_router_enable_expert_bias: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_layer_freq: int = 1
    cp_comm_type: str | None = None
    hidden_size: int = 64
    vocab_size: int = 8


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"apply_rope_fusion": True},
        {"moe_aux_loss_coeff": 1, "moe_router_load_balancing_type": "aux_loss"},
        {"moe_aux_loss_coeff": 0},
        {"moe_layer_freq": [0, 1]},
        {"cp_comm_type": "a2a"},
        {"moe_expert_capacity_factor": None},
    ],
    ids=str,
)
def test_fields_that_can_be_set(fields):
    assert checked(Provider(), fields, "model") == fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"apply_rope_fusio": True}, "model: Provider has no field apply_rope_fusio that .* could set; did you mean"),
        ({"vocab_siz": 8}, "has no field vocab_siz that override_transformer_config could set$"),
        ({"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff does nothing without moe_router_load_balancing_type"),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps cannot be set; it draws random numbers"),
        ({"moe_router_enable_expert_bias": True}, "cannot be set; it changes between calls a buffer of the model"),
        ({"moe_expert_capacity_factor": 1.0}, "cannot be set; it drops tokens by what else is in their micro-batch"),
        (
            {"moe_router_load_balancing_type": "global_aux_loss"},
            "divided by the number of ranks .* set it to aux_loss",
        ),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, "is 'seq_aux_loss', which takes rows"),
        ({"apply_rope_fusion": "maybe"}, "field apply_rope_fusion is 'maybe'; it must be true or false"),
        ({"apply_rope_fusion": 1}, "field apply_rope_fusion is 1; it must be true or false"),
        ({"moe_aux_loss_coeff": "0.1"}, "field moe_aux_loss_coeff is '0.1'; it must be a number, as 0.0"),
        ({"moe_layer_freq": True}, "field moe_layer_freq is True; it must be a number, as 1"),
        ({"hidden_size": 7}, "field hidden_size cannot be set; config.json decides it"),
        ({"vocab_size": 7}, "field vocab_size cannot be set; this backend decides it"),
    ],
    ids=str,
)
def test_fields_that_are_refused(fields, message):
    with pytest.raises(ModelError, match=message):
        checked(Provider(), fields, "model")
