"""Compiled programs are kept between runs, in the user's cache folder."""

import hashlib
import logging
import os
import platform
from pathlib import Path

import jax

log = logging.getLogger(__name__)


def use_compile_cache() -> Path | None:
    """Turns JAX's persistent compilation cache on; call it before anything is compiled.

    The folder is `xla/<machine>` in `JAXPOST_CACHE_DIR`, or else in `~/.cache/jaxpost`
    (`$XDG_CACHE_HOME/jaxpost`). `JAXPOST_CACHE_DIR=none` leaves it off, and one that JAX was
    already told (`JAX_COMPILATION_CACHE_DIR`) stays. Returns the folder in use.
    """
    told = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if told:
        return Path(told)
    chosen = os.environ.get("JAXPOST_CACHE_DIR", "")
    if chosen.lower() == "none":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpost"
    folder = (Path(chosen).expanduser() if chosen else home) / "xla" / machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled programs are not kept: %s: %s", folder, error.strerror)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def machine() -> str:
    """A name for this kind of machine.

    Programs for the CPU use its instructions and are divided among its cores, and a home folder may
    be shared by machines that differ in both.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    kind = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    digest = hashlib.sha256("\n".join(kind or lines[:1]).encode()).hexdigest()
    return f"{platform.machine()}-{cores}-{digest[:8]}"
