"""The small files of a model's folder: its tokenizer, chat template and generation settings.

They travel with the weights, so that a folder written can be used elsewhere.
"""

import pathlib

NAMES: tuple[str, ...] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def read(folder: pathlib.Path) -> dict[str, bytes]:
    """The content of those that a folder holds, by file name."""
    return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}
