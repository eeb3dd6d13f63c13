"""The small files of a model's folder: its tokenizer, chat template and generation settings.

They travel with the weights, so that a folder written can be used elsewhere. Models and tokenizers
are fetched from the hub by the one function here.
"""

import logging
import pathlib
from collections.abc import Sequence

log = logging.getLogger("jaxpost")

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


def fetched(hub_id: str, files: Sequence[str]) -> pathlib.Path:
    """The local cache's folder of a hub repository, files (patterns of names) fetched to it.

    Raises:
      FileNotFoundError: the hub cannot be reached, or does not give it.
    """
    import huggingface_hub

    log.warning("no local folder %s: asking the Hugging Face hub for it", hub_id)
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(files)))
    except Exception as error:  # of several libraries, which change with the version
        said = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{hub_id}: there is no such local folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {said}). On a machine with access run "
            f"`hf download {hub_id} --local-dir FOLDER`, and give FOLDER in its place."
        ) from error


def read(folder: pathlib.Path) -> dict[str, bytes]:
    """The content of those that a folder holds, by file name."""
    return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}
