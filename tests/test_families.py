"""drafter/families.py: what is neither DFlash nor DFlash2 is named and refused."""

from typing import Any

import pytest

from dflash_model.drafter.claims import Source
from dflash_model.drafter.families import refuse_foreign_config, refuse_foreign_tensors
from dflash_model.errors import CheckpointError, ConfigError
from tests.drafter_forms import DFLASH2, OWN_TABLES, REDUCED
from tests.tiny_drafters import GEOMETRY, zlab_config

PLAIN = list(GEOMETRY.tensor_shapes())


def test_plain_tensors_and_a_plain_config_pass() -> None:
    refuse_foreign_tensors([*PLAIN, "layers.0.self_attn.q_proj.bias"])
    refuse_foreign_tensors([*DFLASH2.tensor_shapes(), *REDUCED.tensor_shapes(), *OWN_TABLES.tensor_shapes(), "mask_embedding"])
    refuse_foreign_config(Source(label="config.json", values=zlab_config()))
    neutral: dict[str, Any] = {
        "output_multiplier": 1.0, "input_embedding_scale": 1, "final_logit_softcapping": 0.0, "markov_rank": 0, "projector_type": "dflash",
        "attention_sink_bias": False, "is_neox_style": True,
    }  # fmt: skip
    refuse_foreign_config(Source(label="config.json", values=zlab_config(dflash_config=neutral)))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("markov_head.markov_w1.weight", "DSpark"),
        ("logit_head.confidence_head.proj.weight", "DSpark"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("xpress_head.w1.weight", "XPress"),
        ("mtp.fc.weight", "MTP"),
        ("midlayer.self_attn.q_proj.weight", "EAGLE"),
        ("layers.0.self_attn.qkv_proj.weight", "Laguna"),
        ("layers.0.self_attn.attention_sink_bias", "attention sinks"),
        ("model.layers.0.input_layernorm.weight", "wrapper's prefix"),
        ("fc.bias", "A DFlash drafter has no tensor fc.bias"),
        ("layers.0.mlp.gate_proj.weight_scale", "A DFlash drafter has no tensor layers.0.mlp.gate_proj.weight_scale"),
    ],
)
def test_a_foreign_tensor_names_its_family(name: str, family: str) -> None:
    with pytest.raises(CheckpointError, match=family) as caught:
        refuse_foreign_tensors([*PLAIN, name])
    assert name in caught.value.problem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "an unknown family"),
        ({"architectures": "DFlashDraftModel"}, "expected a list of class names"),
        ({"architectures": []}, "expected a list of one class name"),
        ({"architectures": ["Qwen3XPressModel"]}, "XPress"),
        ({"speculators_model_type": "dspark"}, r"speculators config \(model type dspark\)"),
        ({"transformer_layer_config": {}}, "speculators config"),
        ({"markov_rank": 256}, "markov_rank is 256: this is a DSpark drafter"),
        ({"dflash_config": {"projector_type": "domino"}}, "dflash_config.projector_type is 'domino'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias is True"),
    ],
)
def test_a_foreign_config_names_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_foreign_config(Source(label="config.json", values=zlab_config(**change)))
