"""Uni-Inv and Uni-Edit: what the paper promises of inversion and editing, measured.

Jiao et al., arXiv 2504.13109. One step there and back on a mixture in the plane; reconstruction of held-out digits by
the exact flow of a kernel density estimate, which needs no training and is as stiff as its bandwidth says; and edits of
the right half of pairs of pictures by a class-conditional flow that is trained here, with the left half as known
background.

Choices that the paper does not make:

1. The inversion of Uni-Edit is under the source condition, which keeps the background better here than the null one;
   the rows ``uni_edit_null`` are the paper's.
2. The mask is judged against a constant one of the same mean for each sample and step: a mask of ones also raises the
   weight of the difference, so that the comparison would be of two weights.
3. FireFlow and RF-Solver are judged on the stiff flow at up to 60 calls, by the mean over pictures of their PSNR.
4. Reconstruction is averaged over all digits, held out in turn: where the flow is stiff a digit may end at another one,
   leads differ by 4 dB from digit to digit, and a mean over 200 of them is uncertain by 0.3 dB.
5. Every family's setting is chosen on other pairs of other pictures than those it is reported on.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlab import flow
from jaxlab.experiments.base import Claim, Experiment, Run
from jaxlab.experiments.uniedit import editing, plots, reconstruction
from jaxlab.experiments.uniedit.data import DIGITS, Pairs, Pictures, load_pictures, make_pairs
from jaxlab.experiments.uniedit.training import make_trainer
from jaxlab.nn.dit import DiT, DiTConfig, save_dit

__all__ = ["EXPERIMENT", "Config"]

_STIFF_BANDWIDTH, _STIFF_CALLS = 0.1, 60


@dataclass(frozen=True)
class Config:
    """Reconstruction without training, then edits by a trained flow."""

    bandwidths: tuple[float, ...] = (0.5, 0.25, 0.1, 0.05)
    """of the kernel density estimate; below 0.2 its flow is stiff"""
    calls: tuple[int, ...] = (20, 32, 60, 100)
    """calls of the model in each direction"""
    reconstructions: int = 199
    """digits to hold out and reconstruct at a time"""
    folds: int = 9
    """how often to hold digits out, others each time; of the 1797 there are"""
    data: str = "fashion"
    """digits, fashion, or an .npz file with pictures x and classes y"""
    hidden_size: int = 128
    """width of the network"""
    num_layers: int = 4
    """blocks of the network"""
    patch_size: int = 0
    """side of a patch in pixels, 0 for half a picture"""
    steps: int = 6000
    """training steps"""
    batch: int = 64
    """pairs a training step"""
    learning_rate: float = 2e-3
    """of Adam, at its highest"""
    pairs: int = 128
    """pairs to choose settings on, and as many to report on"""
    held_out: int = 200
    """pictures kept from training, half of them to choose settings on"""
    rows: editing.Rows = "claims"
    """ways to edit: a few, those of the claims, or all"""
    accuracy: float = 0.9
    """share of edits that must hit the target, relative to the classifier's accuracy on real pictures"""

    def __post_init__(self) -> None:
        for name in ("reconstructions", "folds", "hidden_size", "num_layers", "batch", "pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps < 2:
            raise ValueError(f"steps must be at least 2, got {self.steps}")
        if self.held_out < 2:
            raise ValueError(f"held_out must be at least 2, got {self.held_out}")
        if not self.bandwidths or min(self.bandwidths) <= 0:
            raise ValueError(f"bandwidths must be positive, got {self.bandwidths}")
        if not self.calls or min(self.calls) < 4:
            raise ValueError(f"calls must be at least 4, got {self.calls}")
        if not 0 < self.accuracy <= 1:
            raise ValueError(f"accuracy must be in (0, 1], got {self.accuracy}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.patch_size < 0:
            raise ValueError(f"patch_size must be at least 0, got {self.patch_size}")


CLAIMS = (
    Claim(
        "round_trip_third_order_local",
        "One step of Uni-Inv and of the sampler back errs by O(h^3) (log-log slope; Euler's inversion has 2).",
        "in",
        (2.9, 3.1),
    ),
    Claim(
        "beats_euler_inversion_at_equal_calls",
        "Uni-Inv reconstructs better than Euler inversion at every stiffness and number of calls (least lead in dB).",
        ">",
        1.0,
    ),
    Claim(
        "beats_fireflow_and_rf_solver_when_stiff",
        "On the stiff flow Uni-Inv reconstructs better than FireFlow and RF-Solver at up to 60 calls (mean lead over "
        "the better of them, in dB).",
        ">",
        0.0,
        known_gap="level over all digits: mean leads of -0.03 to 0.02 dB over three seeds, 0.15 to 0.21 at up to "
        "32 calls and -0.38 to -0.35 at 60, where FireFlow is ahead (single cells -0.54 to 0.46, each with a standard "
        "error of 0.07 to 0.09); tried: bandwidths 0.05 and 0.1, 20 to 100 calls; 100 digits of quick differ by 0.2 dB",
    ),
    Claim(
        "edit_hits_target",
        "The edits of Uni-Edit are taken for the target class (share, over that of real pictures taken for theirs).",
        ">",
        0.8,
    ),
    Claim(
        "edit_keeps_background",
        "Uni-Edit keeps the background better than SDEdit, RF-Inversion and delayed injection at equal or more calls, "
        "settings chosen on other pairs (least lead in dB).",
        ">",
        1.0,
        known_gap="it hangs on which settings of a rival reach the rate on the choosing pairs: 7.0 dB at seed 0 of "
        "cpu, -3.7 at seed 1, where delayed injection's source reached it there and hits 0.65 on the others to "
        "Uni-Edit's 0.84 (at a strength of the same rate Uni-Edit leads by 0.7 dB)",
    ),
    Claim(
        "mask_is_worth_decibels",
        "The mask keeps the background better than a constant one of the same mean, at the strengths at which both "
        "first hit the target equally often (lead in dB).",
        ">",
        0.5,
    ),
)


def run(config: Config, run: Run) -> None:
    """Measure every claim."""
    pictures = load_pictures(config.data, seed=run.seed, held_out=config.held_out)
    trainer, chunks = _prepare(config, pictures)
    rows = editing.settings(config.rows)
    costs = {"local": 1.0, "reconstruction": _cost_of_reconstruction(config), "training": _cost_of_training(config)}
    costs["edits"] = sum(_cost_of_edit(config, row.calls) for row in rows)
    costs["strips"] = 1.0
    run.plan(sum(costs.values()))
    _local(run, costs["local"])
    _reconstruction(config, run, costs["reconstruction"])

    init_key, edit_key = jax.random.split(run.key)
    carry, _ = run.loop(
        "training",
        trainer.chunk,
        trainer.init(init_key),
        chunks,
        cost=costs["training"],
        log=lambda i, losses: {"step": (i + 1) * len(losses), "loss": losses.mean()},
    )
    model = trainer.model(trainer.parameters(carry))
    save_dit(run.out / "model.npz", model, (pictures.classes, pictures.classes))
    _edits(config, run, pictures, model, edit_key, rows, costs)


def _prepare(config: Config, pictures: Pictures):
    network = _network(config, pictures.train.shape[1:], len(pictures.classes))
    a_chunk = min(50, config.steps)
    chunks = -(-config.steps // a_chunk)
    return (
        make_trainer(
            network,
            pictures,
            steps=chunks * a_chunk,
            steps_a_chunk=a_chunk,
            batch=config.batch,
            learning_rate=config.learning_rate,
        ),
        chunks,
    )


def _network(config: Config, picture: tuple[int, ...], classes: int) -> DiTConfig:
    height, width, channels = picture
    return DiTConfig(
        image_shape=(height, 2 * width, channels),
        patch_size=config.patch_size or height // 2,
        num_classes=(classes, classes),
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
    )


def _local(run: Run, cost: float) -> None:
    found = run.stage("local", lambda: reconstruction.local_slopes(run.seed), cost=cost)
    slopes = {m: np.polyfit(np.log(found["step"]), np.log(found[m]), 1)[0] for m in ("euler", "uni_inv")}
    run.measure("round_trip_third_order_local", slopes["uni_inv"])
    run.note(f"One step there and back: slope {slopes['uni_inv']:.2f} by Uni-Inv, {slopes['euler']:.2f} by Euler.")
    plots.local_error(run, found)


def _reconstruction(config: Config, run: Run, cost: float) -> None:
    digits = load_pictures(DIGITS, seed=run.seed, held_out=0)
    folds = reconstruction.folds_of(digits.train, size=config.reconstructions, count=config.folds)
    centres, data = map(jnp.asarray, folds)
    bandwidths = jnp.asarray(config.bandwidths, jnp.float32)
    grid = [(method, calls) for method in reconstruction.METHODS for calls in config.calls]

    def at(carry: tuple, i: int) -> tuple[tuple, jax.Array]:
        method, calls = grid[i]
        return carry, reconstruction.reconstruction_psnr(centres, bandwidths, data, method=method, calls=calls)

    def log(i: int, psnr: Any) -> dict:
        method, calls = grid[i]
        return {
            "method": method,
            "calls": calls,
            **{f"psnr_{s:g}": p for s, p in zip(config.bandwidths, np.asarray(psnr).mean(-1), strict=True)},
        }

    _, found = run.loop("reconstruction", at, (), len(grid), cost=cost, log=log)
    each = found.reshape(-1, len(config.calls), *found.shape[1:])
    of_pictures = dict(zip(reconstruction.METHODS, each, strict=True))
    psnr = {method: values.mean(-1) for method, values in of_pictures.items()}
    for method, values in psnr.items():
        columns = {
            f"psnr_{s:g}_{n}": values[i, j] for j, s in enumerate(config.bandwidths) for i, n in enumerate(config.calls)
        }
        run.row(f"reconstruct {method}", **columns)
    run.note(
        "psnr_S_N: reconstruction of held-out digits in dB, bandwidth S, N calls each way. Heun's rule and FireFlow "
        "win on smooth flows; where it is stiff, Heun's rule is level with Uni-Inv or ahead."
    )
    leads = of_pictures["uni_inv"] - of_pictures["euler"]
    n, s = np.unravel_index(leads.mean(-1).argmin(), leads.shape[:2])
    least = leads[n, s]
    run.measure("beats_euler_inversion_at_equal_calls", least.mean())
    run.note(
        f"Uni-Inv's least lead over Euler inversion is at bandwidth {config.bandwidths[s]:g} and {config.calls[n]} "
        f"calls, with a standard error over {least.size} digits of {least.std() / math.sqrt(least.size):.2f} dB; nine "
        f"in ten digits have leads in [{np.quantile(least, 0.05):.1f}, {np.quantile(least, 0.95):.1f}] dB."
    )
    stiff = np.ix_(np.array(config.calls) <= _STIFF_CALLS, np.array(config.bandwidths) <= _STIFF_BANDWIDTH)
    if psnr["uni_inv"][stiff].size:
        rival = np.maximum(psnr["fireflow"], psnr["rf_solver"])
        run.measure("beats_fireflow_and_rf_solver_when_stiff", (psnr["uni_inv"] - rival)[stiff].mean())
        ranges = [(psnr["uni_inv"] - other)[stiff] for other in (rival, psnr["heun"])]
        said = [f"{lead.min():.2f} to {lead.max():.2f} dB" for lead in ranges]
        run.note(
            f"Lead of Uni-Inv on the stiff flow at up to {_STIFF_CALLS} calls: {said[0]} over the better of FireFlow "
            f"and RF-Solver, {said[1]} over Heun's rule."
        )
    else:
        run.skip("beats_fireflow_and_rf_solver_when_stiff", "cpu", "no bandwidth up to 0.1 with up to 60 calls")
    plots.reconstruction(run, config.bandwidths, config.calls, psnr)


def _edits(config: Config, run: Run, pictures: Pictures, model: DiT, key, rows, costs) -> None:
    from sklearn.svm import SVC

    half = len(pictures.test) // 2
    halves = [(pictures.test[:half], pictures.test_labels[:half]), (pictures.test[half:], pictures.test_labels[half:])]
    sets = [
        make_pairs(*half, count=config.pairs, classes=len(pictures.classes), seed=run.seed + i)
        for i, half in enumerate(halves)
    ]
    joined = Pairs(*(np.concatenate(parts) for parts in zip(*sets, strict=True)))
    classifier = SVC(C=10.0).fit(pictures.train.reshape(len(pictures.train), -1), pictures.train_labels)
    real = classifier.score(pictures.test.reshape(len(pictures.test), -1), pictures.test_labels)
    velocity = flow.from_nnx(model, stages=("prepare", "apply"))
    images, source, target = map(jnp.asarray, joined)
    null = jnp.broadcast_to(jnp.asarray(model.config.null_labels), source.shape)
    width = images.shape[2] // 2
    left = jnp.arange(2 * width)[:, None] < width

    def at(carry: tuple, i: int) -> tuple[tuple, dict]:
        edited = rows[i].edit(velocity, key, images, source, target, null)
        guessed = classifier.predict(np.asarray(edited[:, :, width:]).reshape(len(edited), -1))
        background = np.asarray(flow.psnr(edited, images, mask=left))
        hit = (guessed == joined.target[:, 1]).astype(np.float32)
        return carry, {"accuracy": hit.reshape(2, -1).mean(1), "background": background.reshape(2, -1).mean(1)}

    def log(i: int, found: dict) -> dict:
        scores = {name: value[1] for name, value in found.items()}
        return {"family": rows[i].family, "setting": rows[i].label, "calls": rows[i].calls, **scores}

    _, found = run.loop("edits", at, (), len(rows), cost=costs["edits"], log=log)
    accuracy, background = found["accuracy"] / real, found["background"]
    families = {
        name: [i for i, row in enumerate(rows) if row.family == name] for name in dict.fromkeys(r.family for r in rows)
    }
    chosen = {
        name: members[editing.choose(accuracy[members, 0], background[members, 0], config.accuracy)]
        for name, members in families.items()
    }
    for i, row in enumerate(rows):
        mark = "*" if i in chosen.values() else ""
        run.row(
            f"{row.family} {row.label}{mark}",
            calls=row.calls,
            background=background[i, 1],
            accuracy=found["accuracy"][i, 1],
        )
    best = {name: background[i, 1] for name, i in chosen.items()}
    rivals = ("sdedit", "rf_inversion", "delayed_injection")
    rival = max(rivals, key=lambda name: best[name])
    members = families["uni_edit"]
    wanted = float(accuracy[chosen[rival], 1])
    level = editing.background_at(accuracy[members, 1], background[members, 1], wanted)
    run.note(
        f"The best rival is {rival} {rows[chosen[rival]].label}, whose edits are taken for the target at a rate of "
        f"{found['accuracy'][chosen[rival], 1]:.3f}. Where Uni-Edit's strength first gives that rate, it leads by "
        f"{level - best[rival]:.1f} dB (nan where none does)."
    )
    run.measure("edit_hits_target", accuracy[chosen["uni_edit"], 1])
    run.measure("edit_keeps_background", best["uni_edit"] - best[rival])
    curves = {
        name: editing.background_at(accuracy[members].mean(1), background[members].mean(1), config.accuracy)
        for name, members in families.items()
        if name.startswith("uni_edit")
    }
    run.measure("mask_is_worth_decibels", curves["uni_edit"] - curves["uni_edit_constant_mask"])
    run.note(
        f"Edits of {pictures.name}: {config.pairs} pairs to choose the settings marked * (best background among those "
        f"that reach {config.accuracy:g} of the classifier's accuracy {real:.3f} on real pictures), as many others for "
        "the columns calls, background (PSNR of the left half in dB) and accuracy. The strength of Uni-Edit and the "
        "settings of its rivals are behind their names; FlowEdit and FireFlow are no part of the claim and are better "
        "where their rows say so."
    )
    points = {
        name: [(rows[i].label, float(found["accuracy"][i, 1]), float(background[i, 1])) for i in members]
        for name, members in families.items()
    }
    plots.edits(run, points, config.accuracy * real)
    few = Pairs(*(part[-4:] for part in joined))
    strength = rows[chosen["uni_edit"]].value
    shown = run.stage("strips", lambda: editing.strip(velocity, few, null[-4:], strength), cost=costs["strips"])
    titles = [
        f"{pictures.classes[a]} to\n{pictures.classes[b]}"
        for a, b in zip(few.source[:, 1], few.target[:, 1], strict=True)
    ]
    plots.strips(run, few.images, shown[1], shown[0], titles)


def _cost_of_reconstruction(config: Config) -> float:
    digits = config.reconstructions * config.folds
    return 1e-5 * digits * len(config.bandwidths) * len(reconstruction.METHODS) * sum(config.calls)


def _cost_of_training(config: Config) -> float:
    return 3e-8 * config.steps * config.batch * config.hidden_size**2 * config.num_layers / 8


def _cost_of_edit(config: Config, calls: int) -> float:
    return 1e-8 * calls * config.pairs * 2 * config.hidden_size**2 * config.num_layers / 8


def _shapes(config: Config) -> jax.ShapeDtypeStruct:
    network = _network(config, (28, 28, 1), 10)

    def velocity(images: jax.Array, t: jax.Array, labels: jax.Array) -> jax.Array:
        return DiT(network, rngs=nnx.Rngs(0))(images, t, labels)

    pair = jax.ShapeDtypeStruct((config.batch, *network.image_shape), jnp.float32)
    labels = jax.ShapeDtypeStruct((config.batch, 2), jnp.int32)
    return jax.eval_shape(velocity, pair, jax.ShapeDtypeStruct((config.batch,), jnp.float32), labels)


EXPERIMENT = Experiment(
    name="uniedit",
    summary="Inversion and region-aware editing with flow models, without training.",
    claims=CLAIMS,
    presets={
        "smoke": Config(
            bandwidths=(0.5,),
            calls=(4,),
            reconstructions=8,
            folds=1,
            data="digits",
            hidden_size=16,
            num_layers=1,
            steps=4,
            batch=8,
            rows="few",
            pairs=4,
            held_out=20,
        ),
        "quick": Config(
            bandwidths=(0.5, 0.1, 0.05),
            calls=(20, 60),
            reconstructions=100,
            folds=1,
            data="digits",
            num_layers=3,
            steps=1500,
            batch=32,
            pairs=40,
            held_out=300,
        ),
        "cpu": Config(rows="all"),
        "paper": Config(
            hidden_size=768,
            num_layers=12,
            patch_size=2,
            steps=200_000,
            batch=1024,
            pairs=1024,
            held_out=10_000,
            rows="all",
        ),
    },
    run=run,
    shapes=_shapes,
)
