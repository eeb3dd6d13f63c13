"""Checkpoints: one save, one restore, and a commit protocol that survives being killed anywhere.

A checkpoint is a folder `step_00000020` holding `state/` (Orbax), `position.<process>.json` (data
position and counters, one a process), `config.json`, `manifest.json` (sha256 and size of each file;
name, shape and type of each array) and `COMMITTED` (sha256 of the manifest). All of it is written
in `tmp.step_…`, flushed to disk and renamed, in this order, so that a folder named `step_…` is
complete; only then are older ones pruned. Orbax does not notice a flipped bit, hence the manifest.

Restoring lists the folders (nothing remembers a "latest"), checks every digest, sets a damaged one
aside as `bad.step_…` (nothing is ever deleted) and walks back to the one before, saying so.

Several processes share one folder, on a file system that all of them see.
"""

from jaxpost.checkpoint.checkpointer import Checkpointer
from jaxpost.checkpoint.choose import find_checkpoint, to_keep
from jaxpost.checkpoint.layout import MANIFEST, MARKER, damage, list_steps
from jaxpost.checkpoint.restore import Restored, load_params, read_config
from jaxpost.checkpoint.settings import CheckpointConfig, CheckpointError

__all__ = [
    "MANIFEST",
    "MARKER",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "Restored",
    "damage",
    "find_checkpoint",
    "list_steps",
    "load_params",
    "read_config",
    "to_keep",
]
