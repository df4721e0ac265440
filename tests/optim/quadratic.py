r"""The quadratic bilevel problem whose solution is known, in NumPy, for the tests of bilevel methods.

:math:`g_i = \frac12 y' A_i y - y' (B_i x + c_i)`, :math:`f_i = \frac12 \lVert y - t_i \rVert^2 + \frac\lambda2 \lVert x
\rVert^2`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxlab.optim.bilevel import BilevelProblem, ClientBatches

RIDGE = 0.1


class Quadratic(NamedTuple):
    """Clients' coefficients on the leading axis."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    target: np.ndarray

    @classmethod
    def make(cls, n: int = 8, *, homogeneous: bool = False) -> "Quadratic":
        random = np.random.RandomState(0)  # the pinned numbers come from this generator
        m = random.standard_normal((n, 4, 4))
        a = 1.5 * np.eye(4) + 0.1 * (m + m.transpose(0, 2, 1))
        b = 0.5 * random.standard_normal((n, 4, 3))
        made = cls(a, b, random.standard_normal((n, 4)), random.standard_normal((n, 4)))
        return cls(*(np.broadcast_to(v.mean(0), v.shape) for v in made)) if homogeneous else made

    @property
    def problem(self) -> BilevelProblem:
        def upper(x, y, batch):
            return 0.5 * jnp.sum((y - batch["target"]) ** 2) + RIDGE / 2 * jnp.sum(x**2)

        def lower(x, y, batch):
            return 0.5 * y @ batch["a"] @ y - y @ (batch["b"] @ x + batch["c"])

        return BilevelProblem(upper, lower)

    @property
    def batches(self) -> ClientBatches:
        dtype = jnp.result_type(float)
        lower = {"a": self.a, "b": self.b, "c": self.c}
        return ClientBatches(
            {name: jnp.asarray(v, dtype) for name, v in lower.items()}, {"target": jnp.asarray(self.target, dtype)}
        )

    def averaged(self) -> tuple:
        """The batches of one client that has the average of all."""
        lower, upper = self.batches
        return {k: v.mean(0) for k, v in lower.items()}, {k: v.mean(0) for k, v in upper.items()}

    def inner(self, x: np.ndarray) -> np.ndarray:
        return np.linalg.solve(self.a.mean(0), self.b.mean(0) @ x + self.c.mean(0))

    def auxiliary(self, x: np.ndarray) -> np.ndarray:
        return -np.linalg.solve(self.a.mean(0), self.inner(x) - self.target.mean(0))

    def hypergradient(self, x: np.ndarray) -> np.ndarray:
        return RIDGE * x - self.b.mean(0).T @ self.auxiliary(x)

    def solution(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        slope = np.linalg.solve(self.a.mean(0), self.b.mean(0))
        offset = np.linalg.solve(self.a.mean(0), self.c.mean(0)) - self.target.mean(0)
        x = -np.linalg.solve(RIDGE * np.eye(3) + slope.T @ slope, slope.T @ offset)
        return x, self.inner(x), self.auxiliary(x)
