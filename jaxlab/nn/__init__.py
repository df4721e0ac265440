"""Networks that the methods share."""

from jaxlab.nn import decoder
from jaxlab.nn.decoder import Decoder, DecoderConfig, next_token_loss

__all__ = ["Decoder", "DecoderConfig", "decoder", "next_token_loss"]
