"""What all tests share: a CPU that plays eight devices, shapes that are checked, `slow` on request.

`pytest` leaves out the tests marked `slow`; `pytest --slow` runs all, `pytest -m slow` only those.
Everything here must happen before anything imports jax or jaxpost, so it stands at the top level.
"""

import gc
import os
import pathlib
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# A shell that starts the tests in the background has Ctrl-C ignored, which programs would inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import jaxtyping
import pytest

# From here on, every call of a function of these modules checks the shapes and types it declares. A
# whole number counts as a float, as in Python's own typing. Left out are the modules at the edge,
# which check what users give them in words of their own.
EDGE = {"__init__", "__main__", "checkpoint", "commands", "config", "recipes", "runs", "writer"}
PACKAGE = pathlib.Path(__file__).parent.parent / "jaxpost"
PARTS = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
jaxtyping.install_import_hook(
    [f"jaxpost.{part}" for part in sorted(PARTS - EDGE)],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or "slow" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("slow")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module", autouse=True)
def released():
    """Lets go of a file's compiled programs: each takes maps of memory, of which Linux gives 65530.

    All programs of the suite in one process need more, and LLVM then ends with a fault.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder of compiled programs, for files that run one recipe several times."""
    folder = tmp_path_factory.mktemp("compiled")
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(folder), 0.0, -1), strict=True):
        jax.config.update(name, value)
    yield folder
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
