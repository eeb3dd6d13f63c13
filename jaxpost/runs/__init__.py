"""A run's folder: who holds it, what its configuration was, how far it got, and how it is stopped.

The folder holds `config.yaml` (resolved), `log.txt`, `lock.json` while a job runs,
`finished.json` once one got to its end, and what the other modules write: `checkpoints/`,
`metrics.jsonl`, `samples.jsonl`. Running the same command again resumes:

    with runs.open_run(folder, config, steps=config.steps) as run:
        if run.finished:
            return run.exit_code
        restored = ...                                    # from checkpoint.Checkpointer
        run.resume(restored.step if restored else 0)      # cuts metrics written after that step
        for step in ...:
            ...
            if run.should_stop(step):
                ...                                       # save
                break
        else:
            run.finish(step)
    return run.exit_code

Stopping. SIGTERM, SIGHUP and the first Ctrl-C ask the loop to save at the end of its update and
exit with code 75 ("run the same command again"); further SIGTERMs change nothing; a second Ctrl-C
exits at once, and the last committed checkpoint stands. With `jax.distributed` JAX owns SIGTERM
and tells all processes at which step to stop; no handler is put over it, and Ctrl-C just ends one.
"""

from jaxpost.runs.changes import FREE_KEYS, Change, config_changes
from jaxpost.runs.disk import RunError
from jaxpost.runs.run import EXIT_PREEMPTED, Run, check_finite, is_finished, open_run

__all__ = [
    "EXIT_PREEMPTED",
    "FREE_KEYS",
    "Change",
    "Run",
    "RunError",
    "check_finite",
    "config_changes",
    "is_finished",
    "open_run",
]
