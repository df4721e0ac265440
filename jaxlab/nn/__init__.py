"""Networks that the methods share, as pure functions of plain parameters, and the checkpoints people have of them.

* :mod:`~jaxlab.nn.decoder`: Llama, Qwen2, Qwen3, Mistral; :mod:`~jaxlab.nn.generation` continues prompts.
* :mod:`~jaxlab.nn.bert`, :mod:`~jaxlab.nn.distilbert`: encoders of text.
* :mod:`~jaxlab.nn.vit`, :mod:`~jaxlab.nn.clip_vision`, :mod:`~jaxlab.nn.dinov2`: encoders of images.
* :mod:`~jaxlab.nn.lora`: low-rank changes of the matrices of any of them.
* :mod:`~jaxlab.nn.checkpoints`: load and save Hugging Face folders, GGUF files, PEFT adapters.
* :mod:`~jaxlab.nn.tokenizer`, :mod:`~jaxlab.nn.evaluation`: text to tokens and back; perplexity and likelihood.
"""

from jaxlab.nn import bert, clip_vision, decoder, dinov2, distilbert, lora, vit
from jaxlab.nn.decoder import Decoder, next_token_loss
from jaxlab.nn.decoder_config import DecoderConfig
from jaxlab.nn.decoder_layout import partition_specs, unstack_layers
from jaxlab.nn.encoder import EncoderOutput
from jaxlab.nn.generation import Generation, generate, generate_stream
from jaxlab.nn.kv_cache import KVCache, init_cache
from jaxlab.nn.rotary import RopeScaling

__all__ = [
    "Decoder",
    "DecoderConfig",
    "EncoderOutput",
    "Generation",
    "KVCache",
    "RopeScaling",
    "bert",
    "clip_vision",
    "decoder",
    "dinov2",
    "distilbert",
    "generate",
    "generate_stream",
    "init_cache",
    "lora",
    "next_token_loss",
    "partition_specs",
    "unstack_layers",
    "vit",
]
