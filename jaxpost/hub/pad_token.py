"""The padding token of a reward model's folder: by it transformers finds where a row ends.

AutoModelForSequenceClassification reads the reward at the last token that is not
`config.pad_token_id`. A padding token that also ends texts (many models pad with EOS) moves that
place to the token before, in silence; so a folder gets one that never ends a text, and its
tokenizer the same one.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpost.hub import source
from jaxpost.models.model import ModelCard

log = logging.getLogger("jaxpost")

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
# Names of special tokens that end no text, the most fitting first.
NEVER_LAST = ("pad", "reserved", "unused", "unk", "start", "begin")


class Padding(NamedTuple):
    """The token's id (None: transformers then reads one row at a time), and the card's files."""

    token_id: int | None
    files: Mapping[str, bytes]


def chosen(card: ModelCard, vocab_size: int) -> Padding:
    """The padding token of the tokenizer or the model, unless it ends texts; else another.

    The log says where the tokenizer gets another, or none is found.
    """
    ids, ends = token_ids(card.files), ending(card)
    own, current = declared(card, "pad_token"), card.hf_config.get("pad_token_id")
    fit = {name: id_ for name, id_ in ids.items() if id_ not in ends and id_ < vocab_size}
    for name in candidates(fit, own, current):
        if name != own:
            log.warning(
                "reward model: its tokenizer's padding token is now %s (was %s), since "
                "transformers reads the reward at the last token that is not padding",
                name,
                own,
            )
        return Padding(fit[name], card.files if name == own else with_pad_token(card.files, name))
    if not ids and current is not None and current not in ends:  # no tokenizer to agree with
        return Padding(current, card.files)
    log.warning(
        "reward model: no padding token was found that never ends a text, so pad_token_id is null "
        "and transformers will read one row at a time"
    )
    return Padding(None, card.files)


def candidates(fit: Mapping[str, int], own: str | None, current: int | None) -> list[str]:
    """Names of tokens that may pad, the best first."""
    of_config = [name for name, id_ in fit.items() if id_ == current]
    by_name = [name for word in NEVER_LAST for name in fit if word in name.lower()]
    return [*(name for name in fit if name == own), *of_config, *by_name]


def ending(card: ModelCard) -> set[int]:
    """The ids that end a text, by the config, the generation config or the tokenizer."""
    result = set()
    for fields in (card.hf_config, content(card.files, "generation_config.json")):
        given = fields.get("eos_token_id")
        result |= set(given) if isinstance(given, list | tuple) else {given}
    result.add(token_ids(card.files).get(declared(card, "eos_token") or ""))
    return result - {None}


def token_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """The ids of the tokenizer's added tokens, in their order."""
    added = content(files, "tokenizer.json").get("added_tokens") or []
    decoder = content(files, "tokenizer_config.json").get("added_tokens_decoder") or {}
    found = {token["content"]: int(token["id"]) for token in added}
    found |= {token["content"]: int(number) for number, token in decoder.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def declared(card: ModelCard, field: str) -> str | None:
    """A special token as the tokenizer's settings name it."""
    for name in SETTINGS:
        given = content(card.files, name).get(field)
        if given:
            return given["content"] if isinstance(given, dict) else given
    return None


def with_pad_token(files: Mapping[str, bytes], token: str) -> dict[str, bytes]:
    """The files, their tokenizer's settings with another padding token."""
    changed = {
        name: source.json_bytes({**content(files, name), "pad_token": token})
        for name in SETTINGS
        if name in files
    }
    return {**files, **changed}


def content(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return json.loads(files[name]) if name in files else {}
