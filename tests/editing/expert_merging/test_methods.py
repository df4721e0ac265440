"""The whole way: experts in every form, both stages, AdaMerging, our decoders, and everything that is refused."""

import re
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing import expert_merging as em
from jaxlab.editing.expert_merging import (
    Alignment,
    Recipe,
    adamerging,
    decoder_forward,
    expert_merging,
    expert_merging_plus_plus,
    methods,
    pose,
    token_batch,
)
from jaxlab.editing.merging import DEFAULT_EXCLUDE
from jaxlab.editing.task_vectors import adapter_vectors, apply, task_vectors
from jaxlab.nn import lora
from jaxlab.nn.decoder import DecoderConfig, init

CONFIG = DecoderConfig(
    vocab_size=17, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, initializer_range=0.3
)
FORWARD = decoder_forward(CONFIG)
APPLY, BASE = init(CONFIG, jax.random.key(0))
SHORT = Recipe(steps=12, gamma=0.1)


def _expert(seed):
    def moved(path, leaf):
        if "proj" not in jax.tree_util.keystr(path):
            return leaf
        return leaf + 0.2 * jax.random.normal(jax.random.fold_in(jax.random.key(seed), leaf.size), leaf.shape)

    return jax.tree.map_with_path(moved, BASE)


EXPERTS = [_expert(1), _expert(2)]
TEXTS = np.random.default_rng(0).integers(0, 17, (2, 4, 10))
BATCHES = [token_batch([text[: 6 + i] for i, text in enumerate(texts)], length=9) for texts in TEXTS]
MASKS = [batch["mask"] for batch in BATCHES]


@pytest.fixture(scope="module")
def merged():
    return expert_merging(FORWARD, BASE, EXPERTS, BATCHES, masks=MASKS, recipe=SHORT)


def test_imitation_is_better_than_task_arithmetic_at_the_anchor(merged):
    """The divergence from the teachers goes down, on the inputs that it was trained on."""
    assert merged.learned.finite
    assert float(merged.learned.parts["logits"][-1]) < 0.9 * float(merged.learned.parts["logits"][0])
    vectors = task_vectors(BASE, EXPERTS, exclude=DEFAULT_EXCLUDE)
    problem = pose(Alignment(FORWARD), BASE, EXPERTS, BATCHES, masks=MASKS)
    for params, wanted in ((apply(BASE, vectors, 0.3), merged.learned.parts), (merged.params, None)):
        parts = problem.objective(params, problem.rows)
        at = 0 if wanted else -1
        assert float(problem.input_weights @ parts["logits"]) == pytest.approx(
            float(merged.learned.parts["logits"][at]), rel=1e-4
        )
    assert merged.importance is None


def test_what_is_not_merged_stays_and_scales_give_the_same_model(merged):
    scales = merged.coefficients.of_tensors()
    assert set(scales) == {path for path in task_vectors(BASE, EXPERTS) if "proj" in path}
    assert all(scale.shape == (2, 2) for scale in scales.values())
    by_scales = apply(BASE, task_vectors(BASE, EXPERTS, exclude=DEFAULT_EXCLUDE), scales)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged.params, by_scales)
    for name in ("embed_tokens", "norm"):
        np.testing.assert_array_equal(merged.params["model"][name]["weight"], BASE["model"][name]["weight"])
    assert "model/layers/1/mlp/up_proj/weight" in merged.coefficients.by_name()


def test_experts_one_at_a_time_and_as_vectors_give_the_same(merged):
    asked = []

    def lazily(k):
        asked.append(k)
        return EXPERTS[k]

    vectors = task_vectors(BASE, EXPERTS)
    for experts in (lazily, vectors):
        found = expert_merging(FORWARD, BASE, experts, BATCHES, masks=MASKS, recipe=SHORT)
        np.testing.assert_allclose(found.learned.loss, merged.learned.loss, rtol=1e-4)
    assert asked == [0, 1]


def test_low_rank_experts():
    adapters = [lora.init(BASE, jax.random.key(k), target=("q_proj",), rank=2) for k in (0, 1)]
    adapters = [a.replace(factors=jax.tree.map(lambda leaf: leaf + 0.3, a.factors)) for a in adapters]
    found = expert_merging(FORWARD, BASE, adapter_vectors(BASE, adapters), BATCHES, masks=MASKS, recipe=SHORT)
    assert set(found.coefficients.alpha) == {"model/layers/self_attn/q_proj/weight"}
    assert float(found.learned.loss[-1]) < float(found.learned.loss[0])


def test_two_stages_put_pieces_where_the_importance_is(merged):
    options = {"masks": MASKS, "recipe": SHORT}
    found = expert_merging_plus_plus(FORWARD, BASE, EXPERTS, BATCHES, budget=1.2, **options)
    importance = np.concatenate([np.asarray(one) for one in found.importance.values()])
    pieces = np.concatenate([leaf.pieces for leaf in found.coefficients.layout.leaves])
    assert importance.sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(pieces, np.floor(1.2 * 14 * importance * (1 + 1e-6)))
    frozen = {leaf.path: np.array(leaf.pieces) == 0 for leaf in found.coefficients.layout.leaves}
    assert any(one.any() for one in frozen.values())
    for path, one in found.coefficients.of_tensors().items():
        np.testing.assert_allclose(np.asarray(one)[:, frozen[path]], 0.3, rtol=1e-6)
    warm = expert_merging_plus_plus(
        FORWARD, BASE, EXPERTS, BATCHES, budget=3.0, min_chunks=1, warm_start=True, **options
    )
    # It starts where the first stage ended, none of it frozen.
    for name, part in warm.learned.parts.items():
        assert float(part[0]) == pytest.approx(float(merged.learned.parts[name][-1]), rel=1e-4)
    assert float(warm.learned.loss[-1]) < float(merged.learned.loss[-1])


def test_adamerging_lowers_the_entropy():
    found = adamerging(FORWARD, BASE, EXPERTS, BATCHES, masks=MASKS, recipe=SHORT)
    assert found.learned.parts.keys() == {"entropy"}
    assert float(found.learned.parts["entropy"][-1]) < float(found.learned.parts["entropy"][0])
    assert methods._ADAMERGING.squash == "none"


def test_the_authors_recipe_and_batches_need_a_key():
    found = expert_merging(FORWARD, BASE, EXPERTS, BATCHES, masks=MASKS, recipe="release", key=jax.random.key(0))
    assert found.learned.loss.shape == (2,)  # eight inputs a step: one step
    with pytest.raises(ValueError, match="a recipe with batches of 8 needs a key"):
        expert_merging(FORWARD, BASE, EXPERTS, BATCHES, recipe="release")


def test_weights_choose_who_is_imitated():
    recipe = Recipe(steps=12, gamma=0.0)
    for weights in ([1.0, 0.0], [0.0, 1.0]):
        alone = expert_merging(FORWARD, BASE, EXPERTS, BATCHES, masks=MASKS, task_weights=weights, recipe=recipe)
        means = [np.asarray(one).mean(1) for one in alone.coefficients.of_tensors().values()]
        ours, theirs = np.mean(means, axis=0)[:: 1 if weights[0] else -1]
        assert ours > max(theirs, 0.3)


def test_experts_that_changed_elsewhere_are_told():
    moved = jax.tree.map(lambda leaf: leaf, EXPERTS[1])
    moved["model"]["embed_tokens"]["weight"] = moved["model"]["embed_tokens"]["weight"] + 0.5
    with pytest.warns(UserWarning, match=r"expert 1 changed in parameters that are not merged by \d\.\d\d times"):
        pose(Alignment(FORWARD), BASE, [EXPERTS[0], moved], BATCHES)


def test_a_loss_that_is_not_finite_is_told():
    broken = [BATCHES[0], BATCHES[1] | {"tokens": BATCHES[1]["tokens"] + 99}]  # outside the vocabulary: NaN
    with pytest.warns(UserWarning, match="not finite at step 0; coefficients before it"):
        found = expert_merging(FORWARD, BASE, EXPERTS, broken, masks=MASKS, recipe=SHORT)
    np.testing.assert_allclose(found.coefficients.of_tensors()["model/layers/mlp/up_proj/weight"], 0.3, rtol=1e-6)


def _narrow():
    return jax.tree.map(lambda leaf: leaf, EXPERTS[1]) | {"lm_head": {"weight": jnp.ones((16, 8))}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": EXPERTS[:1]}, "inputs for each of 1 experts, got 2"),
        ({"experts": [EXPERTS[0], _narrow()]}, r"lm_head/weight must be float32\[17, 8\], got float32\[16, 8\]"),
        ({"experts": lambda k: {}}, "is not like the base: lm_head/weight is missing"),
        ({"experts": EXPERTS[0]}, "must be a sequence of trees, a function, or task vectors"),
        ({"experts": {"lm_head/weight": jnp.ones((2, 17, 8))}}, "include and exclude leave none of the vectors"),
        ({"calibration": []}, "inputs for each of 2 experts, got 0"),
        ({"experts": BASE.__getitem__, "calibration": []}, "at least one expert, got none"),
        (
            {"calibration": [BATCHES[0], {"tokens": jnp.ones((0, 9), int), "mask": MASKS[0][:0]}]},
            "calibration of expert 1",
        ),
        ({"calibration": [BATCHES[0], {"tokens": BATCHES[1]["tokens"]}]}, "mask"),
        ({"masks": MASKS[:1]}, "masks must be given for each of 2 experts, got 1"),
        ({"masks": [mask[:, 1:] for mask in MASKS]}, r"positions of the logits, \(8, 9\) in all; got \(8, 8\)"),
        ({"include": ("router",)}, "include pattern 'router' stands for no parameter"),
        ({"exclude": ("model", "lm_head")}, "leave no floating-point parameter to edit"),
        ({"anchor": 1.0}, r"'sigmoid' the anchor must lie strictly in \(0, 1\)"),
        ({"anchor": [0.3] * 3}, r"anchor must be a number or one for each of 2 experts, got shape \[3\]"),
        ({"task_weights": [1.0, -1.0]}, "task_weights must not be negative, nor all 0"),
        ({"task_weights": 0.0}, "task_weights must not be negative, nor all 0; got 0.0"),
        ({"recipe": "fast"}, "recipe must be a Recipe, 'default' or 'release', got 'fast'"),
        ({"forward": Alignment(FORWARD, hidden_layers=(1,))}, "hidden_layers must be among the 1"),
    ],
)
def test_what_is_refused(changes, message):
    settings = {"forward": FORWARD, "base": BASE, "experts": EXPERTS, "calibration": BATCHES, "recipe": SHORT}
    first = [settings | changes][0]
    positional = [first.pop(name) for name in ("forward", "base", "experts", "calibration")]
    with pytest.raises((ValueError, KeyError), match=message):
        expert_merging(*positional, **first)


def test_texts_of_many_lengths_are_one_batch():
    found = token_batch([[1, 2, 3], [4]], length=2, pad=9)
    np.testing.assert_array_equal(found["tokens"], [[1, 2], [4, 9]])
    np.testing.assert_array_equal(found["mask"], [[True, True], [True, False]])
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        token_batch([[1]], length=0)
    with pytest.raises(ValueError, match=r"tokens in each; got lengths \[1, 0\]"):
        token_batch([[1], []], length=3)


@pytest.mark.parametrize("module", ["coefficients", "methods"])
def test_example_runs(module):
    text = getattr(em, module).__doc__
    example = next(block for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", text) if "base, " in block)
    scope = {"jax": jax, "jnp": jnp} | {name: getattr(em, name) for name in em.__all__}
    scope |= {name: getattr(em.coefficients, name) for name in em.coefficients.__all__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(textwrap.dedent(example), scope)
    if module == "coefficients":
        np.testing.assert_allclose(scope["params"]["w"], 0.6, rtol=1e-6)
    else:
        for found in (scope["merged"], scope["finer"]):
            assert float(found.learned.loss[-1]) < float(found.learned.loss[0])
