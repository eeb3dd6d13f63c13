"""Runs a recipe in processes of its own, and harms them; no tests here.

    python recipe_run.py CONFIG.yaml HARM...

One child a HARM, in turn: `none` lets it end, `kill:12` and `term:12` send it SIGKILL or SIGTERM at
the moment when the checkpoint of step 12 is about to get its name. Each child is what
`jaxpost train CONFIG.yaml` is, and prints its exit code. The launcher forks, so that one import of
JAX serves all children.
"""

import os
import signal
import sys

from jaxpost import __main__ as cli
from jaxpost.commands import train
from jaxpost.recipes import grpo, online_dpo, pmd, ppo, pretrain, sft

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
IMPORTED = (train, pretrain, sft, grpo, ppo, pmd, online_dpo)  # before the fork, with no devices


def arm(harm: str) -> None:
    """A signal to this process when `checkpoints/step_…` appears."""
    name, _, step = harm.partition(":")
    wanted = f"/checkpoints/step_{int(step):08d}"

    def hook(event: str, arguments: tuple) -> None:
        if event == "os.rename" and str(arguments[1]).endswith(wanted):
            os.kill(os.getpid(), SIGNALS[name])

    sys.addaudithook(hook)


def child(config: str, harm: str) -> int:
    """The exit code of one child; -9 when it was killed."""
    number = os.fork()
    if number == 0:
        code = 70
        try:
            if harm != "none":
                arm(harm)
            code = cli.main(["train", config])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


if __name__ == "__main__":
    for each in sys.argv[2:]:
        print(f"child {each} {child(sys.argv[1], each)}", flush=True)
