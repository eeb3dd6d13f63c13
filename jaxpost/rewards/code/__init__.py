"""The code verifier: a program is right when it passes the example's tests, run in a sandbox."""

from jaxpost.rewards.code.verifier import verify

__all__ = ["verify"]
