"""Causal language models of transformers with random weights, a few thousand parameters each; a chat model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 64
_SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_MAMBA: dict[str, Any] = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1)
# Family -> what differs from a small Llama; scales and softcaps far from what changes nothing.
TINY_MODELS: dict[str, dict[str, Any]] = {
    "cohere": dict(logit_scale=0.25),
    "cohere2": dict(logit_scale=0.25),
    "falcon_h1": dict(lm_head_multiplier=0.3, **_MAMBA),
    "gemma": {},
    "gemma2": dict(final_logit_softcapping=0.5),
    "gemma3_text": dict(final_logit_softcapping=0.5),
    "gpt2": dict(n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "gptj": dict(n_embd=16, n_layer=2, n_head=2, n_positions=64, rotary_dim=4),  # its head has a bias
    "granite": dict(logits_scaling=6.0),
    "granitemoe": dict(logits_scaling=6.0, num_local_experts=2, num_experts_per_tok=1),
    "hyperclovax": dict(logits_scaling=6.0),
    "llama": {},
    "llama4_text": dict(
        num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=24, moe_layers=[1],
        interleave_moe_layer_step=2,
    ),
    "minicpm3": dict(
        dim_model_base=4, num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4,
        qk_rope_head_dim=4, v_head_dim=8,
    ),
    "mistral": {},
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.05),
    "nanochat": dict(final_logit_softcapping=0.5),
    "opt": dict(ffn_dim=24, word_embed_proj_dim=8),  # its head takes a projection of the hidden states
    "phi": {},  # its head has a bias
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "qwen3": {},
}  # fmt: skip


# Families that keep states beside keys and values or in place of them, or nothing (openai-gpt).
STATE_MODELS: dict[str, dict[str, Any]] = {
    "falcon_mamba": dict(state_size=8),
    "jamba": dict(
        mamba_d_state=8, mamba_dt_rank=4, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "mamba": dict(state_size=8),
    "mamba2": dict(state_size=8, num_heads=4, n_groups=1, chunk_size=8),
    "openai-gpt": dict(n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "qwen3_next": dict(
        layer_types=["linear_attention", "full_attention"], linear_num_value_heads=2, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
}  # fmt: skip


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A model with weights large enough that its log-probabilities differ by some nats; `options` of its config."""
    import transformers

    config = transformers.CONFIG_MAPPING[family](
        **{**_SMALL, **{**TINY_MODELS, **STATE_MODELS}.get(family, {}), **options}
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


# --- a chat model -----------------------------------------------------------------------------------------------------

WORD_PROBLEMS = Path(__file__).with_name("data") / "word_problems.jsonl"  # in GSM8K's format, written for these tests
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def word_problems() -> list[dict]:
    return [json.loads(line) for line in WORD_PROBLEMS.read_text(encoding="utf-8").splitlines()]


def tiny_chat(folder: Path, *, seed: int = 0) -> Path:
    """Save a random Llama of 20,000 parameters and a byte-pair tokenizer, trained on the word problems, into `folder`.

    With what trips trainers up: completions end at "<|im_end|>", which pads too, or at "<|endoftext|>", the second of
    generation_config, which would change the distribution of samples.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    texts = [text for row in word_problems() for text in (*(m["content"] for m in row["prompt"]), row["answer"])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=specials[2], pad_token=specials[2], bos_token=specials[1],
        chat_template=TEMPLATE, clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip

    config = LlamaConfig(
        vocab_size=words.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.2, attention_dropout=0.1, pad_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.generation_config.update(
        eos_token_id=[2, 0], do_sample=True, top_k=5, top_p=0.5, temperature=0.3, repetition_penalty=1.3
    )
    model.save_pretrained(folder)
    return folder
