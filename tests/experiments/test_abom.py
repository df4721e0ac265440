"""What the experiment adds to the battery: claims from known errors, terrains from a file, configs without sense."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxlab.experiments import abom
from jaxlab.experiments.abom import EXPERIMENT, Config
from jaxlab.experiments.base import Run


@pytest.fixture
def run(tmp_path):
    return Run(EXPERIMENT.claims, preset="quick", seed=0, out=tmp_path)


def errors(**of_methods) -> dict[str, np.ndarray]:
    return {method: np.asarray(values, float) for method, values in of_methods.items()}


def test_claims_follow_from_the_errors(run) -> None:
    """Functions 6, 8, 9 by hand; 9 has its optimum at the centre and must not count."""
    config = Config(functions=(6, 8, 9), coco_functions=(7,))
    found = errors(
        abom=[200, 10, 5],
        abom_no_adaptation=[2000, 1e5, 5],
        abom_paper=[1800, 1, 1],
        abom_jaxlab=[100, 40, 1e-9],
        random_search=[1e3, 1e3, 1],
        pso=[1e3, 5, 1],
        de=[1e3, 1e3, 1],
    )
    abom._judge_functions(config, run, found, errors(abom=[1], abom_jaxlab=[1000]))
    measured = {claim["id"]: claim["measured"] for claim in run.judge(complete=False)["claims"]}
    assert measured == pytest.approx(
        {
            "adaptation_matters": (10 * 1e4) ** 0.5,
            "beats_classical_without_training": 0.5,
            "wins_as_often_as_published": 0.5,
            "matches_the_published_error": 200,
            "released_code_beats_the_equations": 9,
            "preset_beats_released": (0.5 * 4) ** 0.5,
        }
    )


def test_signs_leave_out_the_centre_of_metabox_alone(run) -> None:
    found = errors(abom=[1, 1, 1], de=[2, 0.5, 1.0001])
    abom._count_signs(run, (8, 9, 22), found, "MetaBox")
    abom._count_signs(run, (8, 9, 22), found, "COCO")
    assert run.notes == [
        "MetaBox, 2 functions, worse/equal/better than ABOM: de 1/1/0.",
        "COCO, 3 functions, worse/equal/better than ABOM: de 1/1/1.",
    ]


def test_runs_that_lack_a_method_skip_its_claims(run) -> None:
    config = Config(functions=(1,), dimension=5)
    abom._judge_functions(config, run, errors(abom=[1]), {})
    skipped = {claim["id"] for claim in run.judge(complete=False)["skipped"]}
    assert skipped == {claim.id for claim in EXPERIMENT.claims} - {"uav_beats_de_and_no_adaptation", "rank_invariance"}


def test_terrains_come_from_a_folder_or_are_left_out(run, tmp_path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    np.savez(folder / "island.npz", elevation_cm=np.full((60, 70), 1234, np.uint16))
    config = Config(terrains=1, real_terrains=2, elevation=str(folder), map_size=50, levels=2, threats=1)
    found = abom._terrains(config, run)
    assert [name for name, _ in found] == ["generated 0", "real 0", "real 1"]
    np.testing.assert_allclose(found[1][1].height, 12.34, rtol=1e-6)
    config = Config(terrains=1, real_terrains=1, elevation="no_such_model", map_size=50, levels=2, threats=1)
    assert [name for name, _ in abom._terrains(config, run)] == ["generated 0"]
    assert run.notes[-1].startswith("No real terrain: unknown data set 'no_such_model'")


def test_histories_are_kept_from_the_first_population_to_the_last() -> None:
    kept = abom._evaluations(20000)
    assert (kept[0], kept[-1]) == (20, 20000)
    assert (np.diff(kept) > 0).all()
    assert (kept % 20 == 0).all()


@pytest.mark.parametrize("preset", EXPERIMENT.presets)
def test_presets_have_shapes(preset) -> None:
    config = EXPERIMENT.presets[preset]
    shapes = EXPERIMENT.shapes(config)
    assert {shape.shape for shape in shapes} == {(config.seeds, config.evaluations // 20)}


def test_the_paper_preset_has_the_sizes_of_the_paper() -> None:
    paper = EXPERIMENT.presets["paper"]
    sizes = SimpleNamespace(dimension=500, seeds=30, evaluations=20000, uav_evaluations=2500, terrains=56, map_size=900)
    assert {name: getattr(paper, name) for name in vars(sizes)} == vars(sizes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimension": 1}, "dimension must be at least 2, got 1"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"functions": (25,)}, "functions must be numbers from 1 to 24, got 25"),
        ({"methods": ("abom", "adam")}, "methods must be some of .*, got adam"),
        ({"methods": ("de",)}, "methods must hold abom"),
        ({"functions": (1, 1)}, "functions must differ, got 1, 1"),
        ({"uav_methods": ("abom",)}, "uav_methods must hold abom, abom_no_adaptation and de, got abom"),
        ({"evaluations": 79}, "evaluations must be at least 80, got 79"),
    ],
)
def test_bad_configs_are_named(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
