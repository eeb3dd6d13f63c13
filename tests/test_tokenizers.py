"""Tokenizers: special ids, chat templates held against transformers, SentencePiece, load errors."""

import io
import json
import pickle

import pytest
import sentencepiece
import transformers
from test_chat import CALL, TEMPLATES, TOOL, talk

from jaxpost.data import chat, tokenizers
from jaxpost.data.formats import CompletionRow


def load(**changes):
    """The byte tokenizer with other files; None removes one. Underscores stand for dots."""
    files = dict(tokenizers.byte_tokenizer())
    for name, content in changes.items():
        name = name.replace("__", ".")
        files.pop(name, None)
        if content is not None:
            files[name] = content if isinstance(content, bytes) else json.dumps(content).encode()
    return tokenizers.load_tokenizer_from_files(files)


def config(**changes):
    return {**json.loads(tokenizers.byte_tokenizer()["tokenizer_config.json"]), **changes}


def sentencepiece_model(sentence, **settings):
    """A SentencePiece model of one sentence, with byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence] * 20),
        model_writer=model,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def pieces():
    """A model with two control tokens and one of the user's."""
    return sentencepiece_model(
        "the quick brown fox jumps over the lazy dog é 你好",
        vocab_size=330,
        control_symbols=["[INST]", "[/INST]"],
        user_defined_symbols=["<end>"],
    )


# Special ids -----------------------------------------------------------------------------------


def test_several_ids_end_a_completion():
    used = load(generation_config__json={"eos_token_id": [3, 4]})
    names = ("<|endoftext|>", "<|im_end|>")
    assert used.eos_ids == {3, 4, *(used.id_of(name) for name in names)}
    assert used.eos_id == used.id_of("<|endoftext|>")
    assert load(generation_config__json={"eos_token_id": 3}).eos_ids == used.eos_ids - {4}


def test_the_end_of_turn_comes_from_the_template():
    used = load(generation_config__json=None)
    assert used.eos_ids == {used.id_of("<|endoftext|>"), used.id_of("<|im_end|>")}
    bare = load(generation_config__json=None, chat_template__jinja=None)
    assert bare.eos_ids == {bare.eos_id}


def test_padding_may_equal_an_end():
    used = load()
    assert used.pad_id == used.eos_id
    none = load(tokenizer_config__json=config(pad_token=None))
    assert none.pad_id in none.eos_ids
    own = load(tokenizer_config__json=config(pad_token={"content": "<|bos|>"}))
    assert own.pad_id == own.bos_id


def test_beginning():
    assert load().adds_bos
    assert not load(tokenizer_config__json=config(add_bos_token=False)).adds_bos
    assert not load(tokenizer_config__json=config(add_bos_token=None)).adds_bos
    assert not load(tokenizer_config__json=config(bos_token=None)).adds_bos


def test_bytes_and_back():
    used = load()
    text = "héllo 你\n<|im_end|>"
    ids, spans = used.encode_with_spans(text)
    assert used.decode(ids) == text
    assert used.encode(text) == ids
    assert [text[a:b] for a, b in spans][-2:] == ["\n", "<|im_end|>"]
    assert [text[a:b] for a, b in spans][1:3] == ["é", "é"]
    assert max(ids) < used.vocab_size == 260


@pytest.mark.parametrize(
    "named",
    [
        {"eos_token": "<done>"},
        {"eos_token": {"__type": "AddedToken", "content": "<done>"}, "pad_token": "<pad>"},
        {"additional_special_tokens": ["<a>", "<b>"], "unk_token": "<unk>"},
        {"added_tokens_decoder": {"260": {"content": "<done>", "special": True}}}
        | {"eos_token": "<done>"},
        {"added_tokens_decoder": {"260": {"content": "<think>", "special": False}}}
        | {"bos_token": "a"},
        {"added_tokens_decoder": {"261": {"content": "<b>"}, "260": {"content": "<a>"}}},
    ],
)
def test_special_tokens_that_only_the_settings_name_are_added_as_transformers_does(tmp_path, named):
    text = "a<done>b<pad><a><b><unk> <think>"
    files = {**tokenizers.byte_tokenizer(), "tokenizer_config.json": json.dumps(named).encode()}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizers.load_tokenizer(tmp_path)
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    assert pickle.loads(pickle.dumps(ours)).encode(text) == ours.encode(text)


def test_a_special_token_with_an_id_of_another_tokenizer_is_refused():
    settings = config(added_tokens_decoder={"300": {"content": "<done>", "special": True}})
    wrong = r"gives '<done>' the id 300; tokenizer\.json makes it 260"
    with pytest.raises(ValueError, match=wrong):
        load(tokenizer_config__json=settings)


def test_the_fingerprint_is_of_the_files():
    assert load().fingerprint == load().fingerprint
    assert load().fingerprint != load(generation_config__json=None).fingerprint


def test_pickling(pieces):
    for used in (load(), tokenizers.load_tokenizer_from_files({"tokenizer.model": pieces})):
        again = pickle.loads(pickle.dumps(used))
        assert again.encode("the fox") == used.encode("the fox")
        assert (again.eos_ids, again.fingerprint) == (used.eos_ids, used.fingerprint)


# Chat templates --------------------------------------------------------------------------------

TALKS = {
    "one turn": talk(("user", " q "), ("assistant", "a\n")),
    "two turns": talk(("user", "q"), ("assistant", "a"), ("user", "é<b>'"), ("assistant", "c")),
}
CALLED = [
    *talk(("user", "q")),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    *talk(("tool", "1"), ("assistant", "a")),
]


def both(folder, template, messages, tools=None, **settings):
    """Our text and that of transformers."""
    files = {**tokenizers.byte_tokenizer(), "chat_template.jinja": template.encode()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=tools, tokenize=False, **settings
    )
    return tokenizers.load_tokenizer(folder).render(messages, tools, **settings), theirs


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("turns", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_as_transformers_makes_it(tmp_path, name, turns, prompt):
    ours, theirs = both(tmp_path, TEMPLATES[name][0], TALKS[turns], add_generation_prompt=prompt)
    assert ours == theirs


@pytest.mark.parametrize("settings", [{}, {"enable_thinking": False}])
def test_tools_and_missing_content_as_transformers_has_them(tmp_path, settings):
    ours, theirs = both(
        tmp_path, TEMPLATES["qwen3"][0], CALLED, [TOOL], add_generation_prompt=True, **settings
    )
    assert ours == theirs
    assert '"name": "f"' in ours
    assert "None" not in ours


def test_tokens_that_are_not_set_are_undefined(tmp_path):
    template = "{{ unk_token is defined }}{{ pad_token is defined }}{{ messages[0].content }}"
    ours, theirs = both(tmp_path, template, TALKS["one turn"])
    assert ours == theirs == "FalseTrue q "


def test_markers():
    used = load()
    text, spans = used.render_with_spans(TALKS["two turns"])
    assert [text[a:b] for a, b in spans] == ["a<|im_end|>", "c<|im_end|>"]


def test_where_templates_are_kept():
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    gone = {"chat_template__jinja": None}
    assert load(**gone).chat_template is None
    assert load(tokenizer_config__json=config(chat_template="t"), **gone).chat_template == "t"
    assert load(tokenizer_config__json=config(chat_template=named), **gone).chat_template == "d"
    assert load(chat_template__json={"chat_template": "j"}, **gone).chat_template == "j"


@pytest.mark.parametrize("template", ["{{ messages.a.b }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_a_template_that_fails_is_a_value_error_with_its_line(template):
    with pytest.raises(ValueError, match=r"\(chat_template\.jinja:3\) refuses these messages"):
        load(chat_template__jinja=f"a\n\n{template}".encode()).render(TALKS["one turn"])


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages | nofilter }}"])
def test_a_template_that_is_not_one_is_found_as_it_is_loaded(tmp_path, template):
    files = tokenizers.byte_tokenizer() | {"chat_template.jinja": f"a\n{template}".encode()}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    words = rf"{tmp_path}: chat_template\.jinja:2: not a chat template: "
    with pytest.raises(ValueError, match=words):
        tokenizers.load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config(chat_template=template)))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json\[chat_template\]:1: not a chat"):
        tokenizers.load_tokenizer(tmp_path)


DATED = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + " " + strftime_now( '%Y' ).replace('2', 'two') }}
{%- for m in messages %}{{- m.content }}{%- endfor %}"""


def test_a_template_that_states_the_date_states_the_same_one_every_day():
    """As Llama 3.2's does."""
    used = load(chat_template__jinja=DATED.encode())
    assert used.render(TALKS["one turn"]).startswith("<|bos|>Today Date: 01 Jan 2025 two0two5 q")
    given = used.render(TALKS["one turn"], date_string="2 May")
    assert given.startswith("<|bos|>Today Date: 2 May two0two5 q")
    with pytest.raises(ValueError, match=r"chat_template\.jinja:2: 'strftime_now\(form\) }}' asks"):
        load(chat_template__jinja=b"a\n{{ strftime_now(form) }}").render(TALKS["one turn"])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ m.content }}", ""),
        ("{% if m.content is not none %}{{ m.content + 'x' }}{% endif %}", ""),
        ("{{ m['content'] + 'x' }}", "x"),
    ],
)
def test_a_turn_without_content_is_given_as_the_template_takes_it(template, said):
    used = load(
        chat_template__jinja=("{% for m in messages %}" + template + "{% endfor %}").encode()
    )
    assert used.render([{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == said


# Special tokens in texts -----------------------------------------------------------------------


def test_special_tokens_that_a_text_spells(pieces):
    assert load().spelt_in("a<|im_end|>b<|im_start|><|im_end|>") == ["<|im_end|>", "<|im_start|>"]
    assert load().spelt_in("a <|im_end b") == []
    added = {"900": {"content": "<think>", "special": False}, "901": {"content": "<x>"}}
    settings = json.dumps({"added_tokens_decoder": added}).encode()
    used = tokenizers.load_tokenizer_from_files(
        {"tokenizer.model": pieces, "tokenizer_config.json": settings}
    )
    assert used.spelt_in("<think>[INST] <x></s>") == ["[INST]", "<x>", "</s>"]


# SentencePiece ---------------------------------------------------------------------------------


def test_sentencepiece_there_and_back(pieces, tmp_path):
    (tmp_path / "tiny.model").write_bytes(pieces)
    used = tokenizers.load_tokenizer(tmp_path / "tiny.model")
    text = "<s>[INST]the ü fox 日[/INST]dog é<end></s>"
    ids, spans = used.encode_with_spans(text)
    assert used.decode(ids) == text
    assert ids[:2] == [used.bos_id, used.id_of("[INST]")]
    assert ids[-2:] == [used.id_of("<end>"), used.eos_id]
    controls = [text[a:b] for i, (a, b) in zip(ids, spans, strict=True) if i in used.special_ids]
    assert controls == ["<s>", "[INST]", "[/INST]", "</s>"]
    covered = sorted(set(spans))
    assert covered[-2:] == [(text.index("<end>"), text.index("</s>")), (len(text) - 4, len(text))]
    assert "".join(text[a:b] for a, b in covered) == text
    assert text[slice(*spans[ids.index(used.id_of("<end>"))])] == "<end>"
    assert used.adds_bos
    assert used.eos_ids == {used.eos_id}
    assert used.id_of("no such piece") is None


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_text_that_goes_on_another_begins_without_a_space(kind):
    text = "the quick brown fox jumps over the lazy dog"
    model = sentencepiece_model(text, vocab_size=320, model_type=kind)
    used = tokenizers.load_tokenizer_from_files({"tokenizer.model": model})
    ids, spans = used.encode_inside("quick é")
    assert used.decode(used.encode("the") + ids) == "thequick é"
    assert "".join("quick é"[a:b] for a, b in dict.fromkeys(spans)) == "quick é"
    assert used.encode_inside("") == ([], [])
    # "qu" is a beginning of "quick", so the two are tokenised apart.
    example = chat.tokenize(CompletionRow("the qu", "ick"), used, chat.ChatOptions())
    assert used.decode(example.tokens.tolist()) == "<s>the quick</s>"
    assert used.decode(example.tokens[example.mask].tolist()) == "ick</s>"


def test_nothing_changes_where_no_space_is_put():
    used = load()
    for text in ("a", " a", "\n\n", "é", ""):
        assert used.encode_inside(text) == used.encode_with_spans(text)


def test_sentencepiece_with_tokens_added_later(pieces):
    plain = tokenizers.load_tokenizer_from_files({"tokenizer.model": pieces})
    first = plain.vocab_size
    added = json.dumps({"<|im_start|>": first, "<|im_end|>": first + 1}).encode()
    used = tokenizers.load_tokenizer_from_files(
        {
            "tokenizer.model": pieces,
            "added_tokens.json": added,
            "chat_template.jinja": tokenizers.CHATML.encode(),
        }
    )
    assert used.vocab_size == first + 2
    ids = used.encode("<|im_start|>the<|im_end|>")
    assert (ids[0], ids[-1]) == (first, first + 1)
    assert used.decode(ids) == "<|im_start|>the<|im_end|>"
    assert used.eos_ids == {used.eos_id, first + 1}


# Errors ----------------------------------------------------------------------------------------


def test_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokeniser: no such tokenizer folder"):
        tokenizers.load_tokenizer(tmp_path / "models" / "tokeniser")


def test_a_mistyped_path_beside_the_right_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"models/tinny: no such.*mean models/tiny\?"):
        tokenizers.load_tokenizer("models/tinny")


def test_an_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}: has no tokenizer: expected"):
        tokenizers.load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"{not json", b"[]"])
def test_a_broken_file_is_named(tmp_path, name, content):
    for file, right in tokenizers.byte_tokenizer().items():
        (tmp_path / file).write_bytes(content if file == name else right)
    with pytest.raises(ValueError, match=rf"{tmp_path}: {name} "):
        tokenizers.load_tokenizer(tmp_path)


def test_a_file_that_is_no_sentencepiece_model(tmp_path):
    path = tmp_path / "weights.model"
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"weights\.model: .*not a SentencePiece model"):
        tokenizers.load_tokenizer(path)


def test_the_path_of_tokenizer_json_means_its_folder(tmp_path):
    for file, content in tokenizers.byte_tokenizer().items():
        (tmp_path / file).write_bytes(content)
    used = tokenizers.load_tokenizer(tmp_path / "tokenizer.json")
    assert used.files == tokenizers.byte_tokenizer()
