"""Networks that the methods share."""

from jaxlab.nn import decoder
from jaxlab.nn.decoder import Decoder, next_token_loss
from jaxlab.nn.decoder_config import DecoderConfig
from jaxlab.nn.decoder_layout import partition_specs, unstack_layers
from jaxlab.nn.generation import Generation, generate, generate_stream
from jaxlab.nn.kv_cache import KVCache, init_cache
from jaxlab.nn.rotary import RopeScaling

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Generation",
    "KVCache",
    "RopeScaling",
    "decoder",
    "generate",
    "generate_stream",
    "init_cache",
    "next_token_loss",
    "partition_specs",
    "unstack_layers",
]
