"""Settings of the whole test run.

Eight virtual CPU devices, so that sharded code is sharded; shapes and types of every public function checked; compiled
programs kept between workers and runs; no deadline on property tests, since their first example compiles.
"""

import os
from importlib.metadata import version
from pathlib import Path

# All of these have to be set before jax is imported anywhere, and reach the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile thousands of programs and run each for a moment: code that compiles fast, whatever it is like to run. An
# unknown flag would end the process, so the one that is younger is given to the versions that are known to have it.
_flags = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):
    _flags.append("--xla_cpu_use_fusion_emitters=false")
_flags += [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
os.environ["XLA_FLAGS"] = " ".join(_flags)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "jax"))
# The small programs too: most of the time of the tests goes into compiling thousands of them, many more than once.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# A checkout may stand beside a folder of real data sets; without it the tests that need them skip.
_data = Path(__file__).resolve().parents[2] / "shared" / "data"
if _data.is_dir():
    os.environ.setdefault("JAXLAB_DATA", str(_data))

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

install_import_hook("jaxlab", "beartype.beartype")
hypothesis.settings.register_profile("jaxlab", deadline=None)
hypothesis.settings.load_profile("jaxlab")


# Linux lets a process map 65,530 regions of memory. Every compiled program holds some; XLA crashes where none is left.
_MOST_REGIONS = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Let go of the compiled programs of earlier modules when there are many; they are on disk."""
    regions = Path("/proc/self/maps")
    if regions.exists() and regions.read_bytes().count(b"\n") > _MOST_REGIONS:
        jax.clear_caches()
