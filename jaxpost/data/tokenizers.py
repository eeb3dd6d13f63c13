"""Tokenizers behind one small protocol: Hugging Face folders, and SentencePiece models.

Nothing here adds a special token to what it encodes; special tokens written in the text (as chat
templates do) become their ids. Where BOS and EOS go is decided in `chat`.
"""

import abc
import contextlib
import datetime
import difflib
import functools
import hashlib
import json
import os
import re
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxpost import companions
from jaxpost.data import json_text

Spans = list[tuple[int, int]]
# Texts that are put before another, one after the other, until one does not merge with it.
GUARDS = ("\n", "0", "~", "一")
# The keys of tokenizer_config.json that name a special token.
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# What templates that state the date are told, so that the same row gives the same tokens any day.
TODAY = datetime.date(2025, 1, 1)
DATE = re.compile(r"""strftime_now\s*\(\s*(["'])(.*?)\1\s*\)""")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
      vocab_size: ids are below it.
      bos_id: the id that begins a text, or None.
      adds_bos: whether texts begin with it unless a template says otherwise.
      eos_id: the id that ends a text, or None.
      eos_ids: every id that ends a completion: EOS, those of the generation config, and the token
        that the chat template puts after an assistant's turn.
      pad_id: fills rows; it may equal an EOS, and no mask is made from it.
      chat_template: Jinja source, or None.
      files: what it was read from, by file name.
      fingerprint: a digest of those files.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def adds_bos(self) -> bool: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def files(self) -> Mapping[str, bytes]: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any that it does not spell."""
        ...

    def encode_with_spans(self, text: str) -> tuple[list[int], Spans]:
        """The ids, and where in the text (characters) each comes from."""
        ...

    def encode_inside(self, text: str) -> tuple[list[int], Spans]:
        """The same of a text that goes on another, so that no space is put before it."""
        ...

    def spelt_in(self, text: str) -> list[str]:
        """The special tokens that a text spells, each once."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens spelt out."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The chat template's text of a conversation."""
        ...

    def render_with_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> tuple[str, Spans]:
        """Also the spans between the template's generation markers, if it has any."""
        ...


def load_tokenizer(path_or_hub_id: str | os.PathLike[str]) -> "HubTokenizer | PieceTokenizer":
    """The tokenizer of a folder, a hub id (`owner/name`), or a SentencePiece `.model` file.

    Raises:
      FileNotFoundError: nothing there, or a folder without a tokenizer.
      ValueError: a file that cannot be read; the message names it.
    """
    path = Path(path_or_hub_id)
    if not path.exists():
        path = downloaded(str(path_or_hub_id))
    try:
        if path.is_file() and path.suffix != ".json":
            return PieceTokenizer({"tokenizer.model": path.read_bytes()})
        if path.is_file():
            path = path.parent
        found = load_tokenizer_from_files(companions.read(path))
        _ = found.turn_end_id  # so that a broken template is found here
        return found
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def downloaded(hub_id: str) -> Path:
    """The tokenizer files of a model on the hub."""
    # `models/tiny` next to a folder `models` is a slip of the pen, and not worth a look at the hub.
    local = hub_id.startswith(".") or (Path(hub_id).parent.name and Path(hub_id).parent.is_dir())
    if local or not re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id):
        there = [item.name for item in Path(hub_id).parent.glob("*")] if local else []
        near = difflib.get_close_matches(Path(hub_id).name, there, 1)
        hint = f"; did you mean {Path(hub_id).parent / near[0]}?" if near else ""
        raise FileNotFoundError(
            f"{hub_id}: no such tokenizer folder or file, and not a hub id{hint}"
        )
    return companions.fetched(hub_id, companions.NAMES)


def load_tokenizer_from_files(files: Mapping[str, bytes]) -> "HubTokenizer | PieceTokenizer":
    """A tokenizer from the content of its files, as a `ModelCard` carries them."""
    if "tokenizer.json" in files:
        return HubTokenizer(files)
    if "vocab.json" in files and "merges.txt" in files:
        return HubTokenizer({**files, "tokenizer.json": converted(files)})
    if "tokenizer.model" in files:
        return PieceTokenizer(files)
    raise FileNotFoundError(
        "has no tokenizer: expected tokenizer.json, vocab.json with merges.txt, or tokenizer.model"
    )


def converted(files: Mapping[str, bytes]) -> bytes:
    """`tokenizer.json` of a tokenizer in the older form, made by transformers."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        tokenizer = quiet_transformers().AutoTokenizer.from_pretrained(folder)
        return tokenizer.backend_tokenizer.to_str().encode()


def quiet_transformers() -> Any:
    """The transformers package, without its remarks about torch."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def spelt(token: Any) -> str | None:
    """The text of a special token, which configs give as a string or as an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def json_of(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        found = json_text.loads(files[name].decode())
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} should hold a JSON object")
    return found


def fingerprint_of(files: Mapping[str, bytes]) -> str:
    """A digest of all the files."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name] + b"\0")
    return digest.hexdigest()[:16]


class Templated(abc.ABC):
    """What both kinds of tokenizer share: settings, special tokens, and the chat template."""

    def __init__(self, files: Mapping[str, bytes]):
        self.files = dict(files)
        self.settings = json_of(files, "tokenizer_config.json")
        self.special = {**json_of(files, "special_tokens_map.json"), **self.settings}
        self._template_file, self.chat_template = self._find_template()
        self.fingerprint = fingerprint_of(files)
        ends = json_of(files, "generation_config.json").get("eos_token_id")
        self._ends = ends if isinstance(ends, list) else [ends]

    @abc.abstractmethod
    def id_of(self, token: str) -> int | None:
        """The id of a special token, or None."""

    def _find_template(self) -> tuple[str, str | None]:
        """Where the template stands, and the template."""
        name = "chat_template.jinja"
        if name in self.files:
            try:
                return name, self.files[name].decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{name} is not UTF-8: {error}") from error
        name, template = "tokenizer_config.json", self.settings.get("chat_template")
        if not template:
            name = "chat_template.json"
            template = json_of(self.files, name).get("chat_template")
        if isinstance(template, list):
            named = {item["name"]: item["template"] for item in template}
            template = named.get("default", next(iter(named.values()), None))
        return f"{name}[chat_template]", template

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset(i for i in (*self._ends, self.eos_id, self.turn_end_id) if i is not None)

    @property
    def eos_id(self) -> int | None:
        return self.id_of(spelt(self.special.get("eos_token")) or "")

    @property
    def pad_id(self) -> int:
        pad = self.id_of(spelt(self.special.get("pad_token")) or "")
        return pad if pad is not None else min(self.eos_ids, default=0)

    @functools.cached_property
    def turn_end_id(self) -> int | None:
        """The special token that the template puts after an assistant's words."""
        if self.chat_template is None:
            return None
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcb"}]
        try:
            text = self.render(turns)
        except BrokenTemplateError:
            raise
        except ValueError:
            return None
        tail = text[text.rindex("bcb") + 3 :].strip() if "bcb" in text else ""
        ids = self.encode(tail)
        first = ids[0] if ids else None
        return first if first is not None and first in self.special_ids else None

    @property
    @abc.abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Ids that no plain text spells."""

    @property
    @abc.abstractmethod
    def special_texts(self) -> Sequence[str]:
        """The special tokens that steer the model; not those that are words, such as <think>."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any that it does not spell."""

    @abc.abstractmethod
    def encode_with_spans(self, text: str) -> tuple[list[int], Spans]:
        """The ids, and where in the text each comes from."""

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        texts = sorted(self.special_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def spelt_in(self, text: str) -> list[str]:
        pattern = self._special_pattern
        return list(dict.fromkeys(pattern.findall(text))) if pattern else []

    @functools.cached_property
    def _puts_space(self) -> bool:
        """Whether a text's first token stands for a space too (SentencePiece's dummy prefix)."""
        inside = self._after_a_guard("a")
        return inside is not None and inside[0] != self.encode("a")

    def encode_inside(self, text: str) -> tuple[list[int], Spans]:
        inside = self._after_a_guard(text) if self._puts_space else None
        return self.encode_with_spans(text) if inside is None else inside

    def _after_a_guard(self, text: str) -> tuple[list[int], Spans] | None:
        """What a text is encoded as after some other, where no token holds a bit of both."""
        for guard in GUARDS:
            ids, spans = self.encode_with_spans(guard + text)
            before = self.encode(guard)
            count = len(before)
            apart = all(start >= len(guard) for start, _ in spans[count:])
            if before and before == ids[:count] and apart:
                found = [(start - len(guard), end - len(guard)) for start, end in spans[count:]]
                return ids[count:], found
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The chat template's text.

        Raises:
          BrokenTemplateError: the template is not one.
          ValueError: there is no template, or it refuses these messages.
        """
        return self._render(
            messages, tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )[0]

    def render_with_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> tuple[str, Spans]:
        if not re.search(r"{%-?\s*generation\b", self.chat_template or ""):
            return self.render(messages, tools, **template_kwargs), []
        return self._render(messages, tools, return_assistant_tokens_mask=True, **template_kwargs)

    def _render(self, messages: Any, tools: Any, **settings: Any) -> tuple[str, Spans]:
        # A template may ask whether a key is present: what is None is left out.
        messages = [{k: v for k, v in turn.items() if v is not None} for turn in messages]
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template; add chat_template.jinja to its folder, or "
                "train on text or plain prompt/completion rows"
            )
        if all("content" in turn for turn in messages):
            return self._filled_in(messages, tools, settings)
        # A template reads a turn without words in one of three ways; the first is transformers'.
        forms: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}]
        for form in forms[:-1]:
            with contextlib.suppress(ValueError):
                return self._filled_in([form | turn for turn in messages], tools, settings)
        return self._filled_in([forms[-1] | turn for turn in messages], tools, settings)

    @functools.cached_property
    def _dated_template(self) -> str:
        """The template with TODAY where it asks for the date (transformers would give its own).

        Raises:
          BrokenTemplateError: it asks in a form that is not written out.
        """
        template = self.chat_template or ""
        template = DATE.sub(lambda call: f"({TODAY.strftime(call[2])!r})", template)
        if call := re.search(r"strftime_now\s*\(.*", template):
            line = template.count("\n", 0, call.start()) + 1
            raise BrokenTemplateError(
                f"{self._template_file}:{line}: {call[0][:40]!r} asks for the date in a form that "
                'is not a text, as in strftime_now("%d %b %Y"); write it so'
            )
        return template

    def _filled_in(
        self, messages: Any, tools: Any, settings: Mapping[str, Any]
    ) -> tuple[str, Spans]:
        quiet_transformers()
        from jinja2.exceptions import TemplateSyntaxError
        from transformers.utils import chat_template_utils

        # A template may ask whether a token is defined: what is None is left out.
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: spelt(self.special.get(name)) for name in names if self.special.get(name)}
        template = self._dated_template
        try:
            texts, spans = chat_template_utils.render_jinja_template(
                [messages],
                tools=list(tools) if tools else None,
                chat_template=template,
                **{**tokens, **settings},
            )
        except TemplateSyntaxError as error:
            place = f"{self._template_file}:{error.lineno}"
            raise BrokenTemplateError(f"{place}: not a chat template: {error.message}") from error
        except Exception as error:  # a template is a program, and may fail in any way
            raise ValueError(
                f"the chat template ({self._template_file}{line_of(error)}) refuses these "
                f"messages: {error}"
            ) from error
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if spans else []


class BrokenTemplateError(ValueError):
    """A chat template that is not Jinja, or in a form that is not read."""


def line_of(error: Exception) -> str:
    """`:3`, where line 3 of a template is where an error comes from; else nothing."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in ("<template>", "<unknown>")
    ]
    return f":{lines[-1]}" if lines else ""


class HubTokenizer(Templated):
    """A `tokenizer.json`, by the tokenizers library."""

    def __init__(self, files: Mapping[str, bytes]):
        super().__init__(files)
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_named_tokens()
        self._special_ids = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._first = self._tokenizer.encode("a").ids[:1]
        # It adds special tokens, which is not wanted here, and may cut spaces off a token's span.
        self._tokenizer.post_processor = tokenizers.processors.Sequence([])

    def _add_named_tokens(self) -> None:
        """Adds the special tokens that only the other files name, as transformers does.

        Raises:
          ValueError: a file gives such a token an id that is not the next one free.
        """
        import tokenizers

        there = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        numbered = {token: number for number, token in sorted(added_tokens(self).items())}
        words = added_words(self)
        extra = self.special.get("additional_special_tokens") or ()
        named = [*numbered, *(spelt(self.special.get(name)) for name in NAMED), *map(spelt, extra)]
        for text in dict.fromkeys(text for text in named if text and text not in there):
            token = tokenizers.AddedToken(text, special=text not in words, normalized=False)
            self._tokenizer.add_tokens([token])
            found, wanted = self.id_of(text), numbered.get(text)
            if wanted is not None and found != wanted:
                raise ValueError(
                    f"tokenizer_config.json (or added_tokens.json) gives {text!r} the id {wanted}; "
                    f"tokenizer.json makes it {found}: the files are not of one tokenizer"
                )

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def special_texts(self) -> Sequence[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    @property
    def bos_id(self) -> int | None:
        return self.id_of(spelt(self.special.get("bos_token")) or "")

    @property
    def adds_bos(self) -> bool:
        if self.bos_id is None:
            return False
        if self.settings.get("add_bos_token") is not None:
            return bool(self.settings["add_bos_token"])
        return self._first == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_spans(self, text: str) -> tuple[list[int], Spans]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class PieceTokenizer(Templated):
    """A SentencePiece `.model`; control tokens spelt in a text become their ids."""

    def __init__(self, files: Mapping[str, bytes]):
        super().__init__(files)
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(files["tokenizer.model"])
        except RuntimeError as error:
            raise ValueError(f"tokenizer.model is not a SentencePiece model: {error}") from error
        model = self._model
        for name, number in (("bos_token", model.bos_id()), ("eos_token", model.eos_id())):
            if number >= 0 and not self.special.get(name):
                self.special[name] = model.IdToPiece(number)
        size = model.GetPieceSize()
        self._added = {i: piece for i, piece in added_tokens(self).items() if i >= size}
        controls = {i: model.IdToPiece(i) for i in range(size) if model.IsControl(i)}
        self._special = {**controls, **self._added}
        self._ids = {piece: i for i, piece in self._special.items()}
        pieces = sorted(self._ids, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, pieces)))

    def __reduce__(self):
        return PieceTokenizer, (self.files,)

    def id_of(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        number = self._model.PieceToId(token)
        return number if self._model.IdToPiece(number) == token else None

    @property
    def vocab_size(self) -> int:
        return max(self._model.GetPieceSize(), *(i + 1 for i in self._added), 0)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._special)

    @property
    def special_texts(self) -> Sequence[str]:
        words = added_words(self)
        return [piece for piece in self._special.values() if piece not in words]

    @property
    def bos_id(self) -> int | None:
        return self._model.bos_id() if self._model.bos_id() >= 0 else None

    @property
    def adds_bos(self) -> bool:
        return self.bos_id is not None and bool(self.settings.get("add_bos_token", True))

    def encode(self, text: str) -> list[int]:
        return self.encode_with_spans(text)[0]

    def encode_with_spans(self, text: str) -> tuple[list[int], Spans]:
        ids: list[int] = []
        spans: Spans = []
        start = 0
        for found in self._controls.finditer(text) if self._controls.pattern else ():
            self._plain(text, start, found.start(), ids, spans)
            ids.append(self._ids[found.group()])
            spans.append(found.span())
            start = found.end()
        self._plain(text, start, len(text), ids, spans)
        return ids, spans

    def _plain(self, text: str, start: int, end: int, ids: list[int], spans: Spans) -> None:
        if start == end:
            return
        proto = self._model.encode(text[start:end], return_type="proto")
        for piece in proto.pieces:
            # Its own offsets count bytes or characters, depending on the library's version.
            begin = text.index(piece.surface, start, end)
            start = begin + len(piece.surface)
            ids.append(piece.id)
            spans.append((begin, start))

    def decode(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        plain: list[int] = []
        for number in [*map(int, ids), -1]:
            if number >= 0 and number not in self._special:
                plain.append(number)
                continue
            parts += [self._model.DecodeIds(plain)] if plain else []
            parts += [self._special[number]] if number >= 0 else []
            plain = []
        return "".join(parts)


def added_tokens(tokenizer: Templated) -> dict[int, str]:
    """Tokens that were added to a vocabulary later, by id."""
    older = json_of(tokenizer.files, "added_tokens.json")
    newer = tokenizer.settings.get("added_tokens_decoder") or {}
    found = {int(i): piece for piece, i in older.items()}
    return {**found, **{int(i): spelt(token) or "" for i, token in newer.items()}}


def added_words(tokenizer: Templated) -> set[str | None]:
    """Those of them that are words, such as <think>, and do not steer the model."""
    added = tokenizer.settings.get("added_tokens_decoder") or {}
    return {spelt(token) for token in added.values() if token.get("special") is False}


CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def byte_tokenizer() -> dict[str, bytes]:
    """Files of a tokenizer whose tokens are the 256 bytes and four special ones, with ChatML."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([tokenizers.AddedToken(s, special=True) for s in special])
    ids = [tokenizer.token_to_id(token) for token in special]
    settings = {
        "add_bos_token": True,
        "bos_token": special[0],
        "clean_up_tokenization_spaces": False,
        "eos_token": special[1],
        "pad_token": special[1],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation = {"bos_token_id": ids[0], "eos_token_id": [ids[1], ids[3]], "pad_token_id": ids[1]}
    return {
        "tokenizer.json": (tokenizer.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
        "chat_template.jinja": CHATML.encode(),
        "generation_config.json": (json.dumps(generation, indent=2) + "\n").encode(),
    }
