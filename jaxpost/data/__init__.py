"""Data: files of any known shape to batches of tokens; NumPy only, no JAX.

From the file to the batch: `paths` and `readers` (files to rows), `formats` (any known row to a
canonical one), `chat` and `tokenizers` (rows to tokens and masks), `windows` (packing), `stream`
(batches at a position), and `sources`, the door to all of it.
"""
