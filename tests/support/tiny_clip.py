"""A CLIP model of random weights in the files in which transformers keeps it."""

from __future__ import annotations

from pathlib import Path

import torch

from icom.models.loading import BUNDLE, quiet_libraries

SIDE, CONTEXT = 32, 16


def make_clip(folder: Path) -> Path:
    """Write one into a folder: pictures of SIDE pixels, CONTEXT tokens of the bundled model's tokenizer."""
    quiet_libraries()
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(BUNDLE / "tokenizer")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(
        text_config={"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, **ends, **small},
        vision_config={"image_size": SIDE, "patch_size": 8, **small},
        projection_dim=8,
        initializer_factor=5.0,  # else all pictures look alike
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)  # with these weights pictures and captions of the world point the same way: no score is 0
        CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size).save_pretrained(folder)
    return folder
