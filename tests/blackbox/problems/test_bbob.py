"""BBOB functions: true values from the reference implementations, MetaBox's as frozen numbers, the optimum in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.blackbox.problems import bbob

POINT = np.array([41.0, -73.5, 12.25, 97.0, -105.0])
# metaevobox 2.0.2, environment/problem/SOO/COCO_BBOB/bbob_numpy.py, F1 to F24 drawn in order after
# np.random.seed(3849) as bbob_dataset.py does, at POINT.
METABOX = [
    42219.751610645515,
    3685203285.111409,
    68273555163.53833,
    2437699.8164347573,
    3627.9603114756424,
    4723032.035270814,
    84742.83270547295,
    10418060086.817585,
    49102680718.91788,
    4982841564.293762,
    178876178.52474147,
    1.0032317005862088e29,
    65241.771563315044,
    102517.24300453019,
    159722.73053956704,
    1873.0942867520243,
    1457989574869.038,
    404934526.3826807,
    17329963.041213132,
    69540800.66560403,
    1511.565401138787,
    811.5654011387869,
    2145.6292946022777,
    309480.0423438797,
]


# Points come in the same number for all tests of one dimension, so that they share what is compiled.


@pytest.fixture(scope="module")
def evaluate():
    return jax.jit(lambda instance, points: jax.vmap(lambda x: bbob.value(instance, x))(points))


@pytest.fixture(scope="module")
def excess():
    return jax.jit(jax.vmap(bbob.excess, in_axes=(None, 0)))


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("dimension", "instance"), [(2, 1), (5, 3), (40, 7)])
def test_coco_instances_are_those_of_ioh(evaluate, dimension, instance) -> None:
    ioh = pytest.importorskip("ioh", reason="needs the peers extra: ioh")
    rng = np.random.default_rng(0)
    for function in bbob.FUNCTIONS:
        ours = bbob.coco_instance(function, dimension, instance)
        theirs = ioh.get_problem(function, instance=instance, dimension=dimension, problem_class=ioh.ProblemClass.BBOB)
        # Outside of the box too, where penalties act.
        points = np.concatenate([rng.uniform(-6, 6, (10, dimension)), np.asarray(theirs.optimum.x)[None]])
        np.testing.assert_allclose(
            evaluate(ours, points), [theirs(x) for x in points], rtol=1e-7, atol=1e-8, err_msg=f"f{function}"
        )
        np.testing.assert_allclose(ours.x_opt, theirs.optimum.x, atol=1e-9)
        assert ours.f_opt == theirs.optimum.y


def test_coco_instances_are_those_of_cocoex(evaluate) -> None:
    cocoex = pytest.importorskip("cocoex", reason="needs the peers extra: coco-experiment")
    suite = cocoex.Suite("bbob", "", "dimensions:5 instance_indices:2")
    points = np.random.default_rng(1).uniform(-6, 6, (11, 5))
    assert len(suite) == 24
    for problem in suite:
        ours = bbob.coco_instance(problem.id_function, 5, problem.id_instance)
        np.testing.assert_allclose(evaluate(ours, points), [problem(x) for x in points], rtol=1e-7)


def test_metabox_instances_are_those_of_metaevobox(evaluate) -> None:
    found = [evaluate(instance, np.tile(POINT, (11, 1)))[0] for instance in bbob.metabox_instances(5)]
    np.testing.assert_allclose(found, METABOX, rtol=1e-10)


def test_some_instances_are_the_same_as_among_all() -> None:
    some = bbob.metabox_instances(3, (14, 6))
    every = bbob.metabox_instances(3)
    for one, other in zip(jax.tree.leaves(some), jax.tree.leaves([every[13], every[5]]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dimension", [2, 7])
def test_the_optimum_is_where_it_is_said_to_be(excess, dimension) -> None:
    rng = np.random.default_rng(2)
    for instances, width in (
        ([bbob.coco_instance(f, dimension, 4) for f in bbob.FUNCTIONS], 5),
        (bbob.metabox_instances(dimension), 100),
    ):
        for function, instance in zip(bbob.FUNCTIONS, instances, strict=True):
            near = np.clip(instance.x_opt + 1e-3 * rng.normal(size=(20, dimension)), -width, width)
            far = rng.uniform(-width, width, (20, dimension))
            found = excess(instance, np.concatenate([np.asarray(instance.x_opt)[None], near, far]))
            assert abs(found[0]) < 1e-8
            assert (found[1:21] >= -1e-8).all()
            if (function, width) != (20, 100):  # see the module
                assert (found[21:] > 0).all(), function
            assert (np.abs(instance.x_opt) <= width).all()


def test_float32_is_close(excess) -> None:
    points = np.random.default_rng(3).uniform(-5, 5, (5, 10))
    for function in bbob.FUNCTIONS:
        double = bbob.coco_instance(function, 10)
        single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32 if leaf.dtype == float else leaf.dtype), double)
        rough = excess(single, points.astype(np.float32))
        assert rough.dtype == jnp.float32
        np.testing.assert_allclose(rough, excess(double, points), rtol=1e-3, err_msg=f"f{function}")


def test_a_subset_has_the_same_values() -> None:
    of_some = bbob.excess_of((3, 21))
    for function in (3, 21):
        instance = bbob.coco_instance(function, 3)
        assert of_some(instance, jnp.ones(3)) == bbob.excess(instance, jnp.ones(3))
    assert bbob.excess_of((3, 21)) is of_some


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((25, 5), "BBOB functions are numbered 1 to 24, got 25"),
        ((1, 1), "BBOB functions need at least 2 variables, got 1"),
        ((1, 5, 0), "instances are numbered from 1, got 0"),
    ],
)
def test_numbers_out_of_range_are_named(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        bbob.coco_instance(*arguments)
