"""What all tests share: a CPU that plays eight devices, shapes that are checked, `slow` on request.

`pytest` leaves out the tests marked `slow`; `pytest --slow` runs all, `pytest -m slow` only those.
Everything here must happen before anything imports jax or jaxpost, so it stands at the top level.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jaxtyping
import pytest

# From here on, every call of a function of jaxpost checks the shapes and types it declares. A whole
# number counts as a float, as in Python's own typing.
jaxtyping.install_import_hook(
    "jaxpost", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
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
