"""Small models with random weights and fixed seeds, for shapes that the embedded model does not have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ascend_pd.embedded.model import default_model_dir

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
VOCABULARY = 49_152


def make_gqa_model(directory: Path) -> Path:
    """A Llama with 8 attention and 4 KV heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return _write(LlamaForCausalLM, config, directory)


def make_mla_model(directory: Path) -> Path:
    """A dense DeepSeek-V2 with the one latent width that vLLM's CPU attention takes (512 + 64).

    With YaRN, as the released models have it: vLLM 0.32's CPU kernel for plain rotary embedding turns MLA's key, a
    view with a stride, wrongly; the logits of a position then change with what follows it (shown by prompt_logprobs,
    which with YaRN equal those of transformers).
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    )
    return _write(DeepseekV2ForCausalLM, config, directory)


def _write(model_class: Any, config: Any, directory: Path) -> Path:
    import torch

    torch.manual_seed(20_261_130)
    model = model_class(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Large enough that tokens attend to each other: greedy text then depends on the whole cache.
                parameter.normal_(0.0, 0.08)
    model.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copy(default_model_dir() / name, directory / name)
    return directory
