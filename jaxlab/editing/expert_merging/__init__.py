"""Expert Merging: coefficients of tensors, learned on a few unlabelled inputs (arXiv 2509.25712).

From a base and K experts fine-tuned from it to one model with the skills of all, without labels and without joint
training: each weight matrix of each expert has a coefficient, or several, and they are trained so that the merged model
imitates each expert on that expert's inputs::

    merged = expert_merging(forward, base, experts, calibration)
    merged = expert_merging_plus_plus(forward, base, experts, calibration, budget=1.2)
    merged = adamerging(forward, base, experts, calibration)                 # entropy in place of imitation

* :mod:`~jaxlab.editing.expert_merging.methods`: these functions;
* :mod:`~jaxlab.editing.expert_merging.coefficients`: coefficients of tensors and of pieces, and the merge they give;
* :mod:`~jaxlab.editing.expert_merging.objectives`: imitation, and entropy;
* :mod:`~jaxlab.editing.expert_merging.training`: any optax transformation in one compiled scan;
* :mod:`~jaxlab.editing.expert_merging.importance`: which tensors get more pieces;
* :mod:`~jaxlab.editing.expert_merging.decoders`: our language models as experts.
"""

from jaxlab.editing.expert_merging.coefficients import Coefficients, Layout, tensor_layout
from jaxlab.editing.expert_merging.decoders import decoder_forward, token_batch
from jaxlab.editing.expert_merging.importance import allocate_chunks, layer_importance
from jaxlab.editing.expert_merging.methods import (
    Merged,
    Problem,
    adamerging,
    expert_merging,
    expert_merging_plus_plus,
    pose,
    solve,
)
from jaxlab.editing.expert_merging.objectives import Alignment, Entropy, Rows
from jaxlab.editing.expert_merging.training import Learned, Recipe, learn_coefficients, release

__all__ = [
    "Alignment",
    "Coefficients",
    "Entropy",
    "Layout",
    "Learned",
    "Merged",
    "Problem",
    "Recipe",
    "Rows",
    "adamerging",
    "allocate_chunks",
    "decoder_forward",
    "expert_merging",
    "expert_merging_plus_plus",
    "layer_importance",
    "learn_coefficients",
    "pose",
    "release",
    "solve",
    "tensor_layout",
    "token_batch",
]
