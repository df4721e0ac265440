"""What the experiments read: names resolved to files, text corpora, word tokens and their shards over nodes,
labelled examples shared out among clients.
"""

from jaxlab.data.hub import DownloadError
from jaxlab.data.partition import dirichlet_partition, gamma_similarity_partition
from jaxlab.data.resolve import resolve
from jaxlab.data.shards import hold_out, sample_crops, shard_tokens
from jaxlab.data.text import load_text
from jaxlab.data.words import Vocabulary, split_words

__all__ = [
    "DownloadError",
    "Vocabulary",
    "dirichlet_partition",
    "gamma_similarity_partition",
    "hold_out",
    "load_text",
    "resolve",
    "sample_crops",
    "shard_tokens",
    "split_words",
]
