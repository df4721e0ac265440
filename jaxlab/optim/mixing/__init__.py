r"""Averaging with graph neighbours, on one device or over a mesh axis.

Every leaf of a tree that is mixed has a leading *node axis*. A :class:`Mixer` replaces row ``i`` of every leaf by
:math:`\sum_r W_{ir} x_r` for a mixing matrix ``W`` (see :mod:`jaxlab.optim.topology`). There are two backends with the
same numbers:

* **stacked**: leaves are ``[n, ...]`` on one device (a simulated network);
* **sharded**: inside :func:`jax.shard_map` the leaves are ``[n / devices, ...]`` and the exchange runs over the mesh
  axis ``axis_name`` (many devices, or many hosts after ``jax.distributed.initialize``).

Code written against ``Mixer.mix`` and ``Mixer.mean`` does not know which of the two it runs on. It keeps the node
axis on every leaf and never reduces over that axis itself.

================== ========= =================================================================================
class              backend   one exchange costs, for D numbers a node and m nodes a device
================== ========= =================================================================================
`DenseMixer`       stacked   a matrix product, ``n^2 D`` multiply-adds
`SparseMixer`      stacked   ``max degree * n D`` multiply-adds: large sparse graphs
`MeanMixer`        both      the exact average (complete graph); ``pmean`` over the axis
`CirculantMixer`   sharded   one or two ``ppermute`` an offset, boundary rows only: rings, exponential graphs
`GraphMixer`       sharded   one ``ppermute`` of the device's ``m D`` numbers a round, any graph between devices
`AllGatherMixer`   sharded   ``n D`` numbers received: dense graphs, matrices that change while compiled
`SequenceMixer`    both      a periodic sequence of any of these: time-varying graphs
================== ========= =================================================================================

:func:`make_mixer` picks one from a matrix. Products are accumulated in float32 at full precision (float64 for float64
leaves), whatever the leaf's dtype and the accelerator's default, because gradient tracking relies on column sums of 1.

Example:
  >>> import jax.numpy as jnp
  >>> from jaxlab.optim import mixing, topology
  >>> mixer = mixing.make_mixer(topology.ring(4))
  >>> mixer.mix({"w": jnp.array([0.0, 3.0, 0.0, 0.0])})["w"].round(3).tolist()
  [1.0, 1.0, 1.0, 0.0]
"""

from jaxlab.optim.mixing.choice import make_mixer
from jaxlab.optim.mixing.mixer import MeanMixer, Mixer, SequenceMixer, local_nodes
from jaxlab.optim.mixing.sharded import AllGatherMixer, CirculantMixer, GraphMixer
from jaxlab.optim.mixing.stacked import DenseMixer, SparseMixer

__all__ = [
    "AllGatherMixer",
    "CirculantMixer",
    "DenseMixer",
    "GraphMixer",
    "MeanMixer",
    "Mixer",
    "SequenceMixer",
    "SparseMixer",
    "local_nodes",
    "make_mixer",
]
