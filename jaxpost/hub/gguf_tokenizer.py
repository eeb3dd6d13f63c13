"""The tokenizer inside a GGUF file, written as a Hugging Face `tokenizer.json`."""

from collections.abc import Mapping, Sequence, Set
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


def tokenizer_config(file: File) -> dict[str, Any]:
    tokens = needed(file, "tokens")
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

    tokens, prefix = needed(file, "tokens"), adds_space_prefix(file)
    unknown = metadata(file, "unknown_token_id", 0)
    model = models.BPE(
        vocabulary(file),
        merges_of(tokens, needed(file, "scores"), mergeable(file)),
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
    tokens = needed(file, "tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens holds a token twice")
    return vocab


def adds_space_prefix(file: File) -> bool:
    return metadata(file, "model") == "llama" and bool(metadata(file, "add_space_prefix", True))


def found_whole(file: File, token: str, kind: int) -> bool:
    """Whether a user-defined token is looked for in the text before anything is merged.

    Not one with a space in it where a space is put in front of texts: `tokenizers` would put one in
    front of the token it looks for, too. Its merges come first instead, since it scores highest.
    """
    return kind == USER_DEFINED and not (SPACE in token and adds_space_prefix(file))


def mergeable(file: File) -> set[str]:
    """The tokens that merges lead to and from."""
    pairs = zip(needed(file, "tokens"), needed(file, "token_type"), strict=True)
    usual = (NORMAL, USER_DEFINED)
    return {token for token, kind in pairs if kind in usual and not found_whole(file, token, kind)}


def merges_of(
    tokens: Sequence[str], scores: Sequence[float], pieces: Set[str]
) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best piece first.

    SentencePiece joins the neighbours whose joint piece scores highest; a list of merges gives
    the same order when it is sorted by that score.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token) if token in pieces else 0):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                merges.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def mark_special(tokenizer: Any, file: File) -> None:
    """Control tokens (and the unknown one) are special; user-defined ones are only kept whole.

    One with a `▁` in it can only be found once the spaces of the text have been replaced.
    """
    from tokenizers import AddedToken

    named = ("bos", "eos", "padding", "unknown", "eot")
    ids = {metadata(file, f"{name}_token_id") for name in named}
    special, kept = [], []
    pairs = zip(needed(file, "tokens"), needed(file, "token_type"), strict=True)
    for index, (token, kind) in enumerate(pairs):
        if kind in (CONTROL, UNKNOWN) or index in ids:
            special.append(AddedToken(token, special=True, normalized=False))
        elif found_whole(file, token, kind):
            kept.append(AddedToken(token, special=False, normalized=SPACE in token))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(kept)


def add_bos_eos(tokenizer: Any, file: File) -> None:
    from tokenizers import processors

    tokens = needed(file, "tokens")
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
