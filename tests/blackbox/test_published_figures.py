"""The figures of the paper on one function at full size: 30 variables, 20,000 evaluations, eight seeds.

What is to be 20 and 5 times worse is about 180 and 45 times worse, and two seeds tell.
"""

import jax
import numpy as np
import pytest

from jaxlab.blackbox import ABOM, minimize
from jaxlab.blackbox.problems import bbob


@pytest.fixture(scope="module")
def median_error():
    instance = bbob.metabox_instances(30, (6,))[0]
    function = bbob.excess_of((6,))

    @jax.jit
    def errors(settings, keys):
        box = instance.lower, instance.upper
        return jax.vmap(
            lambda key: minimize(function, settings, *box, key, max_evaluations=20_000, data=instance).best_fitness
        )(keys)

    return lambda settings, seeds: float(np.median(errors(settings, jax.random.split(jax.random.key(0), seeds))))


def test_attractive_sector(median_error) -> None:
    """The paper gives 260 with a spread of 264; without adaptation 4.5e4; its equations as printed are far off."""
    released = median_error(ABOM.released(), 8)
    assert 50 < released < 1500
    assert median_error(ABOM.released(adapt=False), 2) > 20 * released
    assert median_error(ABOM.paper(), 2) > 5 * released
