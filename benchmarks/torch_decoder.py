"""The torch side of `nn_decoder.py`: what a user of `transformers` would run."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
import transformers

from jaxlab.nn import DecoderConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def llama(config: DecoderConfig, weights: Mapping[str, np.ndarray], *, dtype: str, threads: int) -> torch.nn.Module:
    """``transformers.LlamaForCausalLM`` with the given weights, by their names in a checkpoint."""
    torch.set_num_threads(threads)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=config.max_position_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    state = {name: torch.from_numpy(np.array(weight, np.float32)) for name, weight in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(DEVICE, getattr(torch, dtype)).eval()


def prefill(model: torch.nn.Module, prompts: np.ndarray) -> Callable[[], np.ndarray]:
    """Read the prompts and give the likeliest next tokens."""
    tokens = torch.from_numpy(prompts).to(DEVICE)

    @torch.no_grad()
    def run() -> np.ndarray:
        return model(tokens, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).cpu().numpy()

    return run


def generate(model: torch.nn.Module, prompts: np.ndarray, new_tokens: int) -> Callable[[], np.ndarray]:
    """Read the prompts and continue them greedily."""
    tokens = torch.from_numpy(prompts).to(DEVICE)

    @torch.no_grad()
    def run() -> np.ndarray:
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False)
        return out[:, tokens.shape[1] :].cpu().numpy()

    return run
