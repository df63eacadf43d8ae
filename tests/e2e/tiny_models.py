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
