"""A small real training loop over a run's folder, and a launcher that kills it; no tests here.

    python crash_loop.py train FOLDER STEPS SECONDS       trains, so many seconds a step
    python crash_loop.py children FOLDER STEPS HARM...    harmed children in turn, then a whole one
    python crash_loop.py race FOLDER JOBS                 jobs that want the folder all at once

A HARM is `kill:0.3` (SIGKILL 0.3 s after the start), `kill:+0.3` (after the first committed save),
`term:…` and `int:…` (asked to stop), or `fault:33` (SIGKILL at the 33rd file event). The launcher
forks, so that one import of JAX serves all children; each is a process of its own.
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

SIGNALS = {
    "kill": [signal.SIGKILL],
    "term": [signal.SIGTERM, signal.SIGTERM],  # a second one, as some supervisors send
    "int": [signal.SIGINT],
}
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
                if seconds > 1:
                    print("asleep", flush=True)
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


def launch(folder: str, steps: int, harm: str = "none:") -> None:
    """One child; prints its exit code and the newest step it left."""
    mode, moment = harm.split(":")
    before = newest(folder)
    child = os.fork()
    if child == 0:
        if mode == "fault":
            die_at(int(moment), f"{folder}/")
        code = 70
        try:
            code = train(folder, steps, 0.02)
        finally:
            sys.stdout.flush()
            os._exit(code)
    if mode in SIGNALS:
        while moment.startswith("+") and newest(folder) == before and not is_dead(child):
            time.sleep(0.005)
        time.sleep(float(moment))
        for number in SIGNALS[mode]:
            os.kill(child, number)
            time.sleep(0.01)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("child", code, newest(folder), flush=True)


def race(folder: str, jobs: int) -> None:
    """Several jobs open the folder at the same moment and hold it for a while."""
    moment = time.time() + 0.5
    for _ in range(jobs):
        if os.fork() == 0:
            time.sleep(moment - time.time())
            try:
                with runs.open_run(folder, {}, steps=1):
                    time.sleep(1.5)
                    os.write(1, b"held\n")
            except runs.RunError as error:
                os.write(1, f"refused: {error}\n".encode())
            os._exit(0)
    for _ in range(jobs):
        os.wait()


def is_dead(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def newest(folder: str) -> int:
    return max(checkpoint.list_steps(f"{folder}/checkpoints"), default=0)


def main(arguments: list[str]) -> int:
    mode, folder, steps, *harms = arguments
    if mode == "train":
        return train(folder, int(steps), float(harms[0]))
    if mode == "race":
        race(folder, int(steps))
        return 0
    for harm in harms:
        launch(folder, int(steps), harm)
    launch(folder, int(steps))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
