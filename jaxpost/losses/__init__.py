"""Losses: arrays in, one array out, unreduced. `loss_weights` turns them into a number."""

from jaxpost.losses.likelihood import dft, nll, z_loss

__all__ = ["dft", "nll", "z_loss"]
