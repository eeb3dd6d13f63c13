"""A small real training loop over a run's folder, and a launcher that kills it; no tests here.

    python crash_loop.py FOLDER STEPS SECONDS_A_STEP     trains, exits with the run's code
    python crash_loop.py kill FOLDER STEPS MOMENT...     children killed at these, then a whole one
    python crash_loop.py fault FOLDER STEPS COUNT...     children killed at the COUNT-th file event

The launcher forks, so that one import of JAX serves all children; each is a process of its own.
"""

import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpost import checkpoint, runs, writer

optimizer = optax.adamw(1e-2)


def loss_of(params, key):
    x = jax.random.normal(key, (4, 8))
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - jnp.sum(x, 1)) ** 2)


def update(state, key):
    step, params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params, jax.random.fold_in(key, step))
    updates, moments = optimizer.update(gradients, moments, params)
    return (step + 1, optax.apply_updates(params, updates), moments), {"loss": loss}


def initial_state():
    params = {"a": jnp.eye(8, 16), "b": jnp.ones(16) / 16}
    return jnp.zeros((), jnp.int32), params, optimizer.init(params)


def digest(tree) -> str:
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


def train(folder: str, steps: int, seconds: float) -> int:
    config = {"steps": steps, "checkpoint": {"every": 2}, "seed": 0}
    with runs.open_run(folder, config, steps=steps) as run:
        if run.finished:
            return run.exit_code
        state = initial_state()
        train_step = jax.jit(update, donate_argnums=0)
        key = jax.random.key(0)
        with (
            checkpoint.Checkpointer(
                run.checkpoints, checkpoint.CheckpointConfig(every=2, keep_last=2)
            ) as saver,
            writer.Writer(folder, steps=steps) as out,
        ):
            restored = saver.restore(state)
            step = 0 if restored is None else restored.step
            meter = writer.Meter(counters=restored.position if restored else None)
            state = state if restored is None else restored.state
            run.resume(step)
            while step < steps:
                state, metrics = train_step(state, key)
                step += 1
                for done, values in out.write(step, {**metrics, **meter.update(64)}):
                    runs.check_finite(done, values)
                saver.check()
                stop = run.should_stop(step)
                if saver.due(step) or stop or step == steps:
                    for done, values in out.flush():
                        runs.check_finite(done, values)
                    saver.save(step, state, meter.state(), config)
                if stop:
                    break
                time.sleep(seconds)
            saver.wait()
        if step == steps:
            Path(folder, "digest.txt").write_text(digest(state))
            run.finish(step)
    return run.exit_code


def die_at(count: int, folder: str) -> None:
    """Kill this process at the count-th event that touches files of the folder."""
    seen = 0
    lock = threading.Lock()
    watched = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

    def hook(event, arguments):
        nonlocal seen
        if event in watched and any(folder in str(a) for a in arguments[:2]):
            with lock:
                seen += 1
                if seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def launch(folder: str, steps: int, *, delay: str | None = None, fault: int | None = None):
    """One child; killed `0.3` s after its start, or `+0.3` s after its first committed save."""
    before = newest(folder)
    child = os.fork()
    if child == 0:
        if fault is not None:
            die_at(fault, f"{folder}/")
        code = 70
        try:
            code = train(folder, steps, 0.02)
        finally:
            sys.stdout.flush()
            os._exit(code)
    if delay is not None:
        while delay.startswith("+") and newest(folder) == before and not is_dead(child):
            time.sleep(0.005)
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("child", code, newest(folder), flush=True)


def is_dead(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def newest(folder: str) -> int:
    return max(checkpoint.list_steps(f"{folder}/checkpoints"), default=0)


def main(arguments: list[str]) -> int:
    if arguments[0] not in ("kill", "fault"):
        return train(arguments[0], int(arguments[1]), float(arguments[2]))
    mode, folder, steps, *moments = arguments
    for moment in moments:
        if mode == "kill":
            launch(folder, int(steps), delay=moment)
        else:
            launch(folder, int(steps), fault=int(moment))
    launch(folder, int(steps))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
