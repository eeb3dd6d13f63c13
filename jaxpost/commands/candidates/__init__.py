"""The completions among which `best` and `reject` choose, with their rewards and scores.

The reward says what a completion is worth, the scorer is what chooses; without one the reward
chooses too. Parts: `settings`, `sources` (a model, or a file), `judging`, `file` (which keeps what
was judged, so that a command that was stopped goes on).
"""
