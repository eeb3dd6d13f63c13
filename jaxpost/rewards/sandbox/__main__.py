"""`python -m jaxpost.rewards.sandbox`: what this machine offers to confine untrusted code."""

import sys

from jaxpost.rewards.sandbox import levels


def main() -> int:
    trials = levels.probe()
    for trial in trials:
        print(f"{'works' if not trial.failure else 'FAILS'}  {levels.describe(trial.level)}")
        if trial.failure:
            print(f"       {trial.failure}")
    if all(trial.failure for trial in trials):
        print(levels.REMEDY)
        return 1
    return 0


sys.exit(main())
