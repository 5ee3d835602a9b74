"""Tiny models with random weights, made by transformers: the reference and minikv load the same.

Their initializer range is wide and their embeddings untied (but for one), so that greedy output
varies: a model that repeats one token would hide most mistakes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

torch.set_num_threads(1)

VOCAB, EOS = 320, 319
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.1,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=EOS,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
TEXT = (
    "The request waits, runs, and stops. Der Zug fährt über die Brücke. "
    "缓存里的块按顺序被淘汰。 🙂🚀 naïve café — “quoted” "
)


def make_model(kind: str) -> PreTrainedModel:
    """With biases and norm weights unlike those of a fresh model, 0 and 1: a reader of
    checkpoints that mixed them up, or left them out, would give the same numbers."""
    torch.manual_seed(1)
    model = _fresh_model(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.05)
            elif name.endswith("norm.weight"):
                parameter.normal_(1, 0.3)
    return model


def _fresh_model(kind: str) -> PreTrainedModel:
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True))
    if kind == "tied":
        return LlamaForCausalLM(LlamaConfig(**{**COMMON, "tie_word_embeddings": True}))
    if kind == "llama3-rope":
        return LlamaForCausalLM(LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE))
    assert kind == "qwen3"
    return Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=32, attention_bias=True))


KINDS = ("llama", "tied", "llama3-rope", "qwen3")


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text, and characters that several tokens share."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=EOS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    while tokenizer.get_vocab_size() < EOS:
        tokenizer.add_tokens([f"<unused{tokenizer.get_vocab_size()}>"])
    tokenizer.add_special_tokens(["<|end|>"])
    assert tokenizer.token_to_id("<|end|>") == EOS
    return tokenizer


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Reference:
    """transformers, run on the whole growing sequence for every token: no cache to be wrong."""

    def __init__(self, path: Path) -> None:
        model_class = Qwen3ForCausalLM if path.name == "qwen3" else LlamaForCausalLM
        self.model = model_class.from_pretrained(path, dtype=torch.float32).eval()
        self.known: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Output tokens and their log-probabilities; goes on after end-of-sequence."""
        tokens, logprobs = self.known.setdefault(tuple(prompt), ([], []))
        while len(tokens) < num_tokens:
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, -1].float()
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
        return tokens[:num_tokens], logprobs[:num_tokens]
