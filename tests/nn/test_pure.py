"""What a network says of inputs that are no tokens."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn.pure import check_block_mask, check_hidden_states, check_parameters, check_tokens


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


@pytest.mark.parametrize("states", [1, (1.5,), (True,), "0"])
def test_hidden_states_of_another_kind(states):
    with pytest.raises(ValueError, match="hidden_states must be a tuple of integers; got"):
        check_hidden_states(states)


def test_masks_and_parameters_of_another_kind():
    with pytest.raises(ValueError, match="block_mask must be an array with one entry a block; got a list"):
        check_block_mask([1, 1], 2)
    for params in (None, [1]):
        with pytest.raises(ValueError, match="params must be a dict as init or a checkpoint gives it; got a "):
            inspect.unwrap(check_parameters)(params, {"weight": (1,)})  # without the type check of the test run
