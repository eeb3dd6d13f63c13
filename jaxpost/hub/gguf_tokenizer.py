"""The tokenizer inside a GGUF file, written as a Hugging Face `tokenizer.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpost.hub import source
from jaxpost.hub.gguf_in import File

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types of GGUF
SPACE = "▁"

# Pre-tokenizer patterns by `tokenizer.ggml.pre`; each is the regular expression that the models
# of that name were trained with.
LETTERS_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: Mapping[str, str] = {
    "llama-bpe": LETTERS_DIGITS % "1,3",
    "llama3": LETTERS_DIGITS % "1,3",
    "llama-v3": LETTERS_DIGITS % "1,3",
    "qwen2": LETTERS_DIGITS.replace("{%s}", ""),
}
DIGITS_THEN_BYTES = ("smollm",)
BYTES_ONLY = ("gpt-2",)


def companions(file: File) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja.

    Raises:
      ValueError: a tokenizer model or pre-tokenizer that is not supported, by name.
    """
    tokenizer = tokenizer_of(file)
    files = {
        "tokenizer.json": (tokenizer.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": source.json_bytes(tokenizer_config(file)),
    }
    template = metadata(file, "chat_template", prefix="tokenizer.")
    if template:
        files["chat_template.jinja"] = template.encode()
    return files


def metadata(file: File, name: str, default: Any = None, prefix: str = "tokenizer.ggml.") -> Any:
    return file.metadata.get(prefix + name, default)


def needed(file: File, name: str) -> Any:
    value = metadata(file, name)
    if not value:
        raise ValueError(f"{file.path}: GGUF field tokenizer.ggml.{name} is missing or empty")
    return value


def tokens_of(file: File) -> list[str]:
    """The tokens by id. User-defined ones of SentencePiece have spaces as they stand in a text
    (older files have `▁`, as in all other tokens), since they are looked for in the text itself."""
    tokens = needed(file, "tokens")
    if metadata(file, "model") != "llama":
        return tokens
    pairs = zip(tokens, needed(file, "token_type"), strict=True)
    return [token.replace(SPACE, " ") if kind == USER_DEFINED else token for token, kind in pairs]


def tokenizer_config(file: File) -> dict[str, Any]:
    tokens = tokens_of(file)
    result = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.need("context_length"),
        "add_bos_token": adds(file, "bos"),
        "add_eos_token": adds(file, "eos"),
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in names.items():
        index = metadata(file, f"{theirs}_token_id")
        if index is not None:
            result[f"{ours}_token"] = tokens[index]
    return result


def adds(file: File, kind: str) -> bool:
    """Whether encoding puts a bos (eos) token at the start (end)."""
    default = kind == "bos" and metadata(file, "model") == "llama"
    return bool(metadata(file, f"add_{kind}_token", default))


def tokenizer_of(file: File) -> Any:
    """The tokenizer as the `tokenizers` library's object."""
    kind = metadata(file, "model")
    if kind == "gpt2":
        tokenizer = byte_level(file)
    elif kind == "llama":
        tokenizer = sentencepiece(file)
    else:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model = {kind!r} is not supported; "
            f"supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece)"
        )
    mark_special(tokenizer, file)
    add_bos_eos(tokenizer, file)
    return tokenizer


def byte_level(file: File) -> Any:
    """GPT-2's kind: BPE over bytes, cut into words by the pre-tokenizer that the file names."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata(file, "pre")
    if pre in DIGITS_THEN_BYTES:
        first, use_regex = pre_tokenizers.Digits(individual_digits=True), True
    elif pre in PATTERNS:
        first, use_regex = pre_tokenizers.Split(Regex(PATTERNS[pre]), "isolated"), False
    elif pre in BYTES_ONLY:
        first, use_regex = None, True
    else:
        supported = ", ".join((*DIGITS_THEN_BYTES, *PATTERNS, *BYTES_ONLY))
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre = {pre!r} is not supported; supported: {supported}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in needed(file, "merges")]
    whole_words = pre.startswith("llama")  # Llama 3 takes a word that is a token as it is
    tokenizer = Tokenizer(models.BPE(vocabulary(file), merges, ignore_merges=whole_words))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, last]) if first else last
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(file: File) -> Any:
    """SentencePiece's BPE: merges follow from the scores; what no piece covers becomes bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, prefix = tokens_of(file), bool(metadata(file, "add_space_prefix", True))
    unknown = metadata(file, "unknown_token_id", 0)
    model = models.BPE(
        vocabulary(file),
        merges_of(tokens, needed(file, "scores"), needed(file, "token_type")),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def vocabulary(file: File) -> dict[str, int]:
    tokens = tokens_of(file)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens holds a token twice")
    return vocab


def merges_of(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to put an ordinary token together from two others, best token first.

    SentencePiece joins the neighbours whose joint piece scores highest; a list of merges gives
    the same order when it is sorted by that score.
    """
    ids = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
    merges = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-scores[index], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def mark_special(tokenizer: Any, file: File) -> None:
    """Control tokens (and the unknown one) are special; user-defined ones are only kept whole."""
    from tokenizers import AddedToken

    named = ("bos", "eos", "padding", "unknown", "eot")
    ids = {metadata(file, f"{name}_token_id") for name in named}
    special, kept = [], []
    pairs = zip(tokens_of(file), needed(file, "token_type"), strict=True)
    for index, (token, kind) in enumerate(pairs):
        if kind in (CONTROL, UNKNOWN) or index in ids:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            kept.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(kept)


def add_bos_eos(tokenizer: Any, file: File) -> None:
    from tokenizers import processors

    tokens = tokens_of(file)
    ids = {kind: metadata(file, f"{kind}_token_id") for kind in ("bos", "eos") if adds(file, kind)}
    if not ids:
        return
    first = [tokens[ids["bos"]]] if "bos" in ids else []
    last = [tokens[ids["eos"]]] if "eos" in ids else []
    one, two = ([*first, f"${part}", *last] for part in "AB")
    # An id is named `piece:type`; the second sequence of a pair has type 1.
    pair = [*one, *(f"{piece}:1" for piece in two)]
    special = [(tokens[index], index) for index in ids.values()]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=one, pair=pair, special_tokens=special
    )
