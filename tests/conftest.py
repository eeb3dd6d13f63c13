"""What all tests share: eight devices on one CPU, shapes that are checked, slow tests on request.

`pytest` leaves out the tests marked `slow`; `pytest --slow` runs all, `pytest -m slow` only those.
Everything here must happen before anything imports jax or jaxpost, so it stands at the top level.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jaxtyping
import pytest

# Turns every annotation of the package into a check: a wrong shape or type fails where it enters.
jaxtyping.install_import_hook("jaxpost", "beartype.beartype")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow") or "slow" in config.getoption("-m"):
        return
    chosen = [item for item in items if item.get_closest_marker("slow") is None]
    left_out = [item for item in items if item.get_closest_marker("slow") is not None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
