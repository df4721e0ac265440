"""Settings of the whole test run: eight virtual CPU devices, and shapes and types of every public function checked."""

import os

# Both have to be set before jax is imported anywhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from pathlib import Path

from jaxtyping import install_import_hook

install_import_hook("jaxlab", "beartype.beartype")

# A checkout may stand beside a folder of real data sets; without it the tests that need them skip.
_data = Path(__file__).resolve().parents[2] / "shared" / "data"
if _data.is_dir():
    os.environ.setdefault("JAXLAB_DATA", str(_data))
