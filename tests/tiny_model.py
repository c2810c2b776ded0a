"""A language model small enough for tests: 107,200 parameters, bytes as tokens, ChatML, seeded weights."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(directory: Path, seed: int = 0, heads: int = 4) -> Path:
    """Write the model (float32), its tokenizer and generation config to `directory`, which is returned.

    `heads` attention heads of 64 / `heads` dimensions: vLLM on a CPU needs 32 or more.
    Token ids 0, 1, 2 are <|endoftext|> (padding), <|im_start|>, <|im_end|> (end); 3 … 258 are the bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    # Ids must not depend on the order of the byte alphabet, which the library does not promise.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [END_OF_TEXT, START, END]
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    bytes_tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_tokenizer.decoder = decoders.ByteLevel()
    bytes_tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
