"""Settings of the whole test run.

Eight virtual CPU devices, so that sharded code is sharded; shapes and types of every public function checked; compiled
programs kept between workers and runs; no deadline on property tests, since their first example compiles.
"""

import os
from pathlib import Path

# All of these have to be set before jax is imported anywhere, and reach the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "jax"))
# The small programs too: most of the time of the tests goes into compiling thousands of them, many more than once.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# A checkout may stand beside a folder of real data sets; without it the tests that need them skip.
_data = Path(__file__).resolve().parents[2] / "shared" / "data"
if _data.is_dir():
    os.environ.setdefault("JAXLAB_DATA", str(_data))

import hypothesis
from jaxtyping import install_import_hook

install_import_hook("jaxlab", "beartype.beartype")
hypothesis.settings.register_profile("jaxlab", deadline=None)
hypothesis.settings.load_profile("jaxlab")
