"""Data: files of any known shape to batches of tokens; NumPy only, no JAX."""
