"""Bases and experts, trained before anything is merged."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.data import load_text
from jaxlab.editing.expert_merging import Alignment, Rows, decoder_forward
from jaxlab.editing.task_vectors import edited_paths, path_of
from jaxlab.experiments.base import Run
from jaxlab.experiments.expert_merging import digits, language
from jaxlab.experiments.expert_merging.comparison import Setting
from jaxlab.nn.checkpoints import load

if TYPE_CHECKING:
    from jaxlab.experiments.expert_merging import Config

__all__ = ["Trained", "train"]

_STEPS_A_CHUNK = 50


class Trained(NamedTuple):
    """What is merged.

    Attributes:
      domains: names.
      objective: imitation.
      setting: bases, task vectors, inputs and tests.
      base: scores of the bases, ``[R, K]``.
      experts: of each expert on its own domain, ``[R, K]``.
    """

    domains: tuple[str, ...]
    objective: Alignment
    setting: Setting
    base: Float[np.ndarray, "r k"]
    experts: Float[np.ndarray, "r k"]


def train(config: "Config", run: Run, costs: dict[str, float]) -> Trained:
    """Train, or restore, the base and the experts of every repeat."""
    makers = {"digits": _digits, "language": _language, "checkpoints": _checkpoints}
    return makers[config.domains](config, run, costs)


def _digits(config: "Config", run: Run, costs: dict[str, float]) -> Trained:
    splits = digits.split_digits(run.seed, config.repeats)
    base, experts = run.stage(
        "training",
        lambda: digits.train(
            run.key,
            splits,
            base_steps=config.base_steps,
            expert_steps=config.expert_steps,
            batch_size=config.batch_size,
            width=config.width,
        ),
        cost=costs["training"],
    )
    objective = Alignment(digits.forward, hidden_layers=(digits.BLOCKS // 2 - 1,))
    inputs = splits.train[:, 1:, : config.most_inputs]
    return _finish(
        config, digits.DOMAINS, objective, base, experts, inputs, (splits.test[:, 1:], splits.test_labels), _accuracy
    )


def _accuracy(params: Any, test: tuple[Array, Array]) -> Float[Array, " k"]:
    return digits.accuracy(params, *test)


def _language(config: "Config", run: Run, costs: dict[str, float]) -> Trained:
    network = language.network(config.width, config.blocks, config.context)
    texts, held_out = language.read_domains(config.code, config.english, run.seed)
    steps_of = {"base": config.base_steps, **dict.fromkeys(language.DOMAINS, config.expert_steps)}

    def fit(name: str, params: Any, mixture: Any, *, peak: float, blocks_only: bool) -> Any:
        steps = steps_of[name]
        sizes = np.diff(np.round(np.cumsum([0.0, *mixture]) / sum(mixture) * config.batch_size)).astype(int).tolist()

        def body(carry: Any, i: int) -> Any:
            count = min(_STEPS_A_CHUNK, steps - i * _STEPS_A_CHUNK)
            draws = np.random.default_rng((run.seed, list(steps_of).index(name), i))
            parts = [
                language.windows(text, draws, (count, size), config.context)
                for text, size in zip(texts, sizes, strict=True)
            ]
            carry, losses = language.train_steps(
                carry, np.concatenate(parts, 1), config=network, peak=peak, steps=steps, blocks_only=blocks_only
            )
            return carry, losses[-1]

        # A copy, for the carry is donated.
        carry = jax.tree.map(jnp.array, (params, language.optimizer_of(peak, steps).init(params)))
        (params, _), _ = run.loop(
            name,
            body,
            carry,
            -(-steps // _STEPS_A_CHUNK),
            cost=costs[name],
            log=lambda i, loss: {"step": min((i + 1) * _STEPS_A_CHUNK, steps), "loss": loss},
        )
        return params

    base = fit("base", language.fresh(network, run.key), language.MIXTURE, peak=3e-3, blocks_only=False)
    experts = [
        fit(name, base, np.eye(len(language.DOMAINS))[k], peak=config.expert_rate, blocks_only=True)
        for k, name in enumerate(language.DOMAINS)
    ]
    draws = np.random.default_rng((run.seed, 7))
    inputs = np.stack([language.windows(text, draws, (config.most_inputs,), config.context) for text in texts])[None]
    tests = np.stack([language.windows(text, draws, (config.test_windows,), config.context + 1) for text in held_out])[
        None
    ]
    objective = Alignment(decoder_forward(network))
    mask = np.ones(inputs.shape, bool)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], *experts)
    return _finish(
        config,
        language.DOMAINS,
        objective,
        jax.tree.map(lambda leaf: leaf[None], base),
        stacked,
        {"tokens": inputs, "mask": mask},
        tests,
        language.minus_loss(network),
    )


def _checkpoints(config: "Config", run: Run, costs: dict[str, float]) -> Trained:
    base, *experts = [
        load(name, dtype=config.dtype, download=config.download) for name in (config.model, *config.experts)
    ]
    if base.tokenizer is None:
        raise ValueError(f"{config.model} has no tokenizer that can be read (tokenizer.json)")
    draws = np.random.default_rng((run.seed, 7))
    inputs, tests = [], []
    for name in config.texts:
        tokens = np.asarray(base.tokenizer.encode(load_text(name)[: config.most_characters]))
        cut = int(len(tokens) * (1 - language.HELD_OUT))
        inputs.append(language.windows(tokens[:cut], draws, (config.most_inputs,), config.context))
        tests.append(language.windows(tokens[cut:], draws, (config.test_windows,), config.context + 1))
    return _finish(
        config,
        config.texts,
        Alignment(decoder_forward(base.config)),
        jax.tree.map(lambda leaf: leaf[None], base.params),
        jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], *(expert.params for expert in experts)),
        {"tokens": np.stack(inputs)[None], "mask": np.ones(np.shape(inputs), bool)[None]},
        np.stack(tests)[None],
        language.minus_loss(base.config),
    )


def _finish(
    config: "Config",
    domains: tuple[str, ...],
    objective: Alignment,
    base: Any,
    experts: Any,
    inputs: Any,
    tests: Any,
    score: Any,
) -> Trained:
    """Task vectors, what the teachers say, and the scores of base and experts."""

    @jax.jit
    def ask(base: Any, experts: Any, inputs: Any, tests: Any) -> Any:
        def teach(expert: Any, batch: Any) -> Any:
            return objective.target(expert, batch)

        def teach_all(one: Any) -> Any:
            return jax.lax.map(lambda pair: teach(*pair), one)

        targets = jax.lax.map(teach_all, (experts, inputs))
        of_base = jax.lax.map(lambda one: score(*one), (base, tests))

        def of_experts(one: Any) -> Array:
            return jnp.diagonal(jax.lax.map(lambda expert: score(expert, one[1]), one[0]))

        return targets, of_base, jax.lax.map(of_experts, (experts, tests))

    targets, of_base, of_experts = ask(base, experts, inputs, tests)
    flat = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:]), (inputs, targets))
    first = jax.tree.map(lambda leaf: leaf[0], base)
    chosen = edited_paths(first, exclude=("head", "norm", "embed_tokens"))
    changes = {
        path_of(path): one.astype(jnp.float32) - leaf[:, None].astype(jnp.float32)
        for (path, leaf), one in zip(jax.tree.leaves_with_path(base), jax.tree.leaves(experts), strict=True)
    }
    positions = flat[1]["logits"].shape[:-1]
    rows = Rows(flat[0], jnp.ones(positions), flat[1])
    setting = Setting(base, {path: changes[path] for path in chosen}, rows, tests, score, config.at_once)
    return Trained(domains, objective, setting, np.asarray(of_base), np.asarray(of_experts))
