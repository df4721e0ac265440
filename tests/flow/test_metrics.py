"""Metrics against values by hand and a slow transcription."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.flow import psnr, ssim, structure_distance


def test_psnr() -> None:
    x = jnp.zeros((2, 4, 4, 1))
    y = x.at[1, :2].set(0.2)
    np.testing.assert_allclose(psnr(x, y), [np.inf, 10 * np.log10(4 / 0.02)], rtol=1e-5)
    top = jnp.zeros((4, 4, 1)).at[:2].set(1)
    np.testing.assert_allclose(psnr(x, y, mask=top)[1], 20.0, rtol=1e-5)  # error 0.2 of a range of 2
    np.testing.assert_allclose(psnr(x, y, mask=top, data_range=1.0)[1], 10 * np.log10(1 / 0.04), rtol=1e-5)


def test_ssim_against_windows_one_by_one() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1, 13, 14, 1))
    y = np.clip(x + 0.3 * rng.normal(size=x.shape), -1, 1)
    offsets = np.arange(-5, 6)
    window = np.exp(-(offsets[:, None] ** 2 + offsets**2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for i in range(3):
        for j in range(4):
            a, b = (image[0, i : i + 11, j : j + 11, 0] for image in (x, y))
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            cov = (window * (a - mean_a) * (b - mean_b)).sum()
            c1, c2 = 0.02**2, 0.06**2
            top = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
            values.append(top / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)))
    found = ssim(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
    np.testing.assert_allclose(found[0], np.mean(values), atol=1e-5)
    np.testing.assert_allclose(ssim(jnp.asarray(x, jnp.float32), jnp.asarray(x, jnp.float32)), 1, atol=1e-6)


def test_ssim_refuses_images_below_its_window() -> None:
    with pytest.raises(ValueError, match="at least 11 pixels wide and high, got 8 x 8"):
        ssim(jnp.zeros((1, 8, 8, 1)), jnp.zeros((1, 8, 8, 1)))


def test_structure_is_what_angles_of_tokens_say() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 6, 3))
    rotation = jnp.linalg.qr(jax.random.normal(jax.random.key(1), (3, 3)))[0]
    same = structure_distance(lambda tokens: tokens, x, 2 * x @ rotation)
    np.testing.assert_allclose(same, 0, atol=1e-6)
    a, b = jnp.eye(2)[None], jnp.array([[[1.0, 0.0], [1.0, 0.0]]])
    np.testing.assert_allclose(structure_distance(lambda tokens: tokens, a, b), 0.5, rtol=1e-6)
