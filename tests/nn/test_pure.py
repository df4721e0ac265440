"""What a network says of inputs that are no tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn.pure import check_tokens


@pytest.mark.parametrize(
    ("tokens", "others", "message"),
    [
        ([[1, 2]], {}, r"tokens must be an array \[batch, length\]; got a list"),
        (np.arange(3), {}, r"tokens must be integers \[batch, length\]; got int64 of shape \(3,\)"),
        (np.ones((1, 3)), {}, r"got float64 of shape \(1, 3\)"),
        (np.ones((1, 3), bool), {}, r"got bool of shape \(1, 3\)"),
        (
            np.ones((2, 3), int),
            {"padding_mask": np.ones((2, 4), bool)},
            r"padding_mask must have the shape of the tokens, \(2, 3\); got \(2, 4\)",
        ),
    ],
)
def test_tokens_of_another_kind(tokens, others, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(tokens, **others)


def test_tokens_may_be_traced_and_one_row_may_stand_for_all():
    jax.eval_shape(check_tokens, jnp.ones((2, 3), jnp.int32))
    check_tokens(np.ones((2, 3), int), positions=np.ones((1, 3), int), padding_mask=None)
