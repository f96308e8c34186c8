"""drafter/families.py: what is not plain DFlash is named and refused."""

from typing import Any

import pytest

from dflash_model.drafter.claims import Source
from dflash_model.drafter.families import refuse_foreign_config, refuse_foreign_tensors
from dflash_model.errors import CheckpointError, ConfigError
from tests.tiny_drafters import GEOMETRY, zlab_config

PLAIN = list(GEOMETRY.tensor_shapes())


def test_plain_tensors_and_a_plain_config_pass() -> None:
    refuse_foreign_tensors([*PLAIN, "layers.0.self_attn.q_proj.bias"])
    refuse_foreign_config(Source(label="config.json", values=zlab_config()))
    neutral: dict[str, Any] = {
        "output_multiplier": 1.0, "input_embedding_scale": 1, "final_logit_softcapping": 0.0, "markov_rank": 0, "projector_type": "dflash",
        "attention_sink_bias": False, "is_neox_style": True,
    }  # fmt: skip
    refuse_foreign_config(Source(label="config.json", values=zlab_config(dflash_config=neutral)))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("layers.0.attention_conv.base_kernel", "DFlash2"),
        ("candidate_selector.predecessor_codebook", "DFlash2"),
        ("markov_head.markov_w1.weight", "DSpark"),
        ("logit_head.confidence_head.proj.weight", "DSpark"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("midlayer.self_attn.q_proj.weight", "EAGLE"),
        ("d2t", "reduced vocabulary"),
        ("mask_embedding", "mask embedding"),
        ("layers.0.self_attn.qkv_proj.weight", "Laguna"),
        ("layers.0.self_attn.attention_sink_bias", "attention sinks"),
        ("lm_head.weight", "its own embedding or head"),
        ("model.layers.0.input_layernorm.weight", "wrapper's prefix"),
        ("fc.bias", "A plain DFlash drafter has no tensor fc.bias"),
        ("layers.0.mlp.gate_proj.weight_scale", "A plain DFlash drafter has no tensor layers.0.mlp.gate_proj.weight_scale"),
    ],
)
def test_a_foreign_tensor_names_its_family(name: str, family: str) -> None:
    with pytest.raises(CheckpointError, match=family) as caught:
        refuse_foreign_tensors([*PLAIN, name])
    assert name in caught.value.problem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures names DFlash2DraftModel: .* but DFlash2"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "an unknown family"),
        ({"architectures": "DFlashDraftModel"}, "expected a list of class names"),
        ({"speculators_model_type": "dspark"}, r"speculators config \(model type dspark\)"),
        ({"transformer_layer_config": {}}, "speculators config"),
        ({"markov_rank": 256}, "markov_rank is 256: this is a DSpark drafter"),
        ({"dflash_config": {"projector_type": "domino"}}, "dflash_config.projector_type is 'domino'"),
        ({"dflash_config": {"selector_rank": 16}}, "dflash_config.selector_rank is 16: this is a DFlash2 drafter"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"dflash_config": {"output_multiplier": 0.5}}, "dflash_config.output_multiplier is 0.5; only 1"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; only 0"),
        ({"input_embedding_scale": 9.8}, "input_embedding_scale is 9.8"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias is True"),
        ({"is_neox_style": False}, "is_neox_style is False"),
    ],
)
def test_a_foreign_config_names_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_foreign_config(Source(label="config.json", values=zlab_config(**change)))
