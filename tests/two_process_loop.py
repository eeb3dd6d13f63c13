"""One of two processes of a small sharded run; no tests here.

python two_process_loop.py RANK PORT FOLDER STEPS [TERM_AT]    rank 1 gets a SIGTERM at that step
"""

import os
import signal
import sys
import time

import jax

rank, port, folder, steps = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
term_at = int(sys.argv[5]) if len(sys.argv) > 5 else None
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from jaxpost import checkpoint, runs, writer  # noqa: E402

mesh = Mesh(np.array(jax.devices()), ("data",))
shardings = (
    NamedSharding(mesh, PartitionSpec()),
    NamedSharding(mesh, PartitionSpec("data")),
)


def initial_state():
    return jnp.zeros((), jnp.int32), jnp.arange(16, dtype=jnp.float32)


def update(state):
    step, w = state
    total = jnp.sum(w)
    return (step + 1, w * 0.99 + total * 1e-3), {"loss": total}


def train() -> int:
    config = {"steps": steps}
    train_step = jax.jit(
        update, donate_argnums=0, out_shardings=(shardings, {"loss": shardings[0]})
    )
    with runs.open_run(folder, config, steps=steps) as run:
        if run.finished:
            return run.exit_code
        saver = checkpoint.Checkpointer(run.checkpoints, checkpoint.CheckpointConfig(every=5))
        with saver, writer.Writer(folder, steps=steps) as out:
            state = jax.jit(initial_state, out_shardings=shardings)()
            restored = saver.restore(state)
            step = 0
            if restored is not None:
                step, state = restored.step, restored.state
                assert restored.position == {"rank": rank, "step": step}
            run.resume(step)
            while step < steps:
                state, metrics = train_step(state)
                step += 1
                for done, values in out.write(step, metrics):
                    runs.check_finite(done, values)
                saver.check()
                stop = run.should_stop(step)
                if saver.due(step) or stop or step == steps:
                    out.flush()
                    saver.save(step, state, {"rank": rank, "step": step}, config)
                if stop:
                    break
                time.sleep(0.1)
                if term_at is not None and rank == 1 and step == term_at:
                    os.kill(os.getpid(), signal.SIGTERM)
            saver.wait()
        if step == steps:
            run.finish(step)
        mine = [np.asarray(shard.data).tolist() for shard in state[1].addressable_shards]
        print("stopped at", step, mine, flush=True)
    return run.exit_code


code = train()
jax.distributed.shutdown()
sys.exit(code)
