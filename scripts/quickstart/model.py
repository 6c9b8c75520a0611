"""The quickstart's starting models, a Qwen2 and a Qwen3-MoE, with their own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MIXTURE = dict(
    num_hidden_layers=4,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    moe_intermediate_size=64,  # vLLM packs experts for the CPU by multiples of 32
)


def build_tokenizer(instruction: str, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Build a tokenizer of single bytes, with one token for the instruction that all questions share.

    With bytes the model reads every letter of a word; the one token keeps prompts at a dozen tokens. `merges` are pairs
    of pieces that also become tokens; earlier pairs are merged first.
    """
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    tokenizer.add_tokens([AddedToken(instruction, normalized=False)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, spread: float = 0.02, mixture: bool = False, **shape: Any
) -> Any:
    """Build a model with random weights, in float32: a Qwen2, or a mixture of 8 experts of which 2 process each token.

    Its vocabulary equals the tokenizer's: vLLM masks surplus logits and the trainer does not, which would bias every
    log-probability by a constant.

    Args:
        spread: standard deviation of the weights.
        shape: keys of transformers' configuration, for another size.
    """
    torch.manual_seed(seed)
    common = dict(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,  # of 32 dimensions each, the fewest that vLLM's attention supports
        num_key_value_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any
    if mixture:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(common | MIXTURE | shape)))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**(common | shape)))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
