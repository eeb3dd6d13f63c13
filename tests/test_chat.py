"""Which tokens of a row are trained, under chat templates of every make."""

import json
import pickle
import time

import numpy as np
import pytest
import tokenizers as hf_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from jaxpost.batch import Example
from jaxpost.data import chat, tokenizers
from jaxpost.data.formats import (
    ChatRow,
    CompletionRow,
    Dropped,
    Noted,
    ReasoningRow,
    TextRow,
    TokensRow,
)

LLAMA2 = """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}
{%- elif m.role == 'assistant' -%}{{ ' ' + m.content | trim + ' ' + eos_token }}
{%- else -%}{{ raise_exception('only user and assistant') }}{%- endif -%}
{%- endfor -%}"""
LLAMA3 = """{{- bos_token -}}{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '<|bos|>\n\n' + m.content | trim + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|bos|>\n\n' -}}{%- endif -%}"""
GEMMA = """{{ bos_token }}{%- if messages[0].role == 'system' -%}
{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate') }}{%- endif -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{ '<|im_start|>' + role + '\n' + m.content | trim + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}"""
QWEN3 = """{%- if tools -%}{{- '<|im_start|>system\nTools:' -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- set content = m.content if m.content is defined else '' -%}
{%- if m.role == 'assistant' and loop.index0 < ns.last -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}
{{- '<|im_start|>' + m.role + '\n' + content -}}
{%- if m.tool_calls is defined -%}{%- for call in m.tool_calls -%}
{{- '\n<tool_call>' + call.function | tojson + '</tool_call>' -}}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}{%- endif -%}"""
STRIPS_ALL = """{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n'
+ m.content.split('</think>')[-1] | trim + '<|im_end|>' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"""
HOPELESS = """{%- for m in messages -%}{{ m.content | upper }}{{ messages | length }}
{%- endfor -%}"""
PLAIN = """{%- for m in messages -%}{{ m.role + ': ' + m.content + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
BARE_CHATML = tokenizers.CHATML.replace("{%- generation -%}", "").replace(
    "{%- endgeneration -%}", ""
)
SHORT_MARKERS = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content -}}{%- endgeneration -%}
{%- else -%}{{- m.content -}}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
# Each template, and what the assistant's words "w" are trained as.
TEMPLATES = {
    "chatml": (BARE_CHATML, "w<|im_end|>"),
    "markers": (tokenizers.CHATML, "w<|im_end|>"),
    "short_markers": (SHORT_MARKERS, "w<|im_end|>"),
    "llama2": (LLAMA2, " w <|endoftext|>"),
    "llama3": (LLAMA3, "w<|im_end|>"),
    "gemma": (GEMMA, "w<|im_end|>"),
    "qwen3": (QWEN3, "w<|im_end|>"),
}
OPTIONS = chat.ChatOptions()
TALK = (("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "bc"))
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def tokenizer(template, **extra):
    files = {**tokenizers.byte_tokenizer(), **extra}
    if template is None:
        del files["chat_template.jinja"]
    else:
        files["chat_template.jinja"] = template.encode()
    return tokenizers.load_tokenizer_from_files(files)


def talk(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def row(*turns, **other):
    return ChatRow(talk(*turns), where="rows.jsonl:3", **other)


def tokenize(row, template=BARE_CHATML, **options):
    return chat.tokenize(row, tokenizer(template), chat.ChatOptions(**options))


def trained(example, names=None):
    """The runs of trained tokens, as texts."""
    assert example.mask.shape == example.tokens.shape == example.weights.shape
    assert ((example.weights > 0) == example.mask).all()
    names, runs, inside = names or tokenizer(BARE_CHATML), [], False
    for token, mask in zip(example.tokens, example.mask, strict=True):
        if mask and not inside:
            runs.append([])
        if mask:
            runs[-1].append(int(token))
        inside = mask
    return [names.decode(run) for run in runs]


# Conversations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_assistant_turn_is_trained_with_its_end_and_nothing_else(name):
    template, words = TEMPLATES[name]
    example = tokenize(row(*TALK), template)
    assert trained(example) == [words.replace("w", "a"), words.replace("w", "bc")]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_of_the_whole_text(name):
    used = tokenizer(TEMPLATES[name][0])
    text = used.render(talk(*TALK))
    assert chat.tokenize(row(*TALK), used, OPTIONS).tokens.tolist() == used.encode(text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_and_completion_make_the_whole(name):
    """What is trained begins where the sampler begins."""
    used = tokenizer(TEMPLATES[name][0])
    asked = chat.question(row(*TALK), used, OPTIONS)
    example = chat.tokenize(row(*TALK), used, chat.ChatOptions(train_on="last"))
    start = len(asked.prompt)
    assert example.tokens[:start].tolist() == list(asked.prompt)
    assert example.mask.argmax() == start
    assert asked.answer == "bc"


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_completion_messages_train_as_the_last_turn_does(name):
    messages = talk(*TALK)
    split = CompletionRow(messages[:3], messages[3:], where="rows.jsonl:3")
    one, two = (
        tokenize(split, TEMPLATES[name][0]),
        tokenize(row(*TALK), TEMPLATES[name][0], train_on="last"),
    )
    for left, right in zip(one, two, strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_newline_after_a_turn_is_read_and_not_trained():
    example = tokenize(row(("user", "q"), ("assistant", "a")))
    assert not example.mask[-1]
    assert tokenizer(BARE_CHATML).decode(example.tokens[-2:].tolist()) == "<|im_end|>\n"
    assert example.mask[-2]


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_second_end_and_no_second_beginning(name):
    used = tokenizer(TEMPLATES[name][0])
    tokens = chat.tokenize(row(("user", "q"), ("assistant", "a")), used, OPTIONS).tokens.tolist()
    assert sum(token in used.eos_ids for token in tokens[-2:]) == 1
    assert tokens[:2].count(used.bos_id) <= 1


def test_an_end_is_added_where_the_template_has_none():
    assert trained(tokenize(row(*TALK), PLAIN)) == ["a\n", "bc\n<|endoftext|>"]


def test_train_on_last_and_all():
    assert trained(tokenize(row(*TALK), train_on="last")) == ["bc<|im_end|>"]
    assert tokenize(row(*TALK), train_on="all").mask.all()
    assert tokenize(row(("user", "q")), train_on="all").mask.all()


def test_train_on_holds_for_prompts_and_completions_too():
    more = talk(("assistant", "a"), ("user", "r"), ("assistant", "bc"))
    turns = CompletionRow(talk(("user", "q")), more)
    assert trained(tokenize(turns)) == ["a<|im_end|>", "bc<|im_end|>"]
    assert trained(tokenize(turns, train_on="last")) == ["bc<|im_end|>"]
    whole = tokenize(ChatRow(list(turns.prompt) + more), train_on="all")
    assert whole.mask.all()
    np.testing.assert_array_equal(tokenize(turns, train_on="all").mask, whole.mask)
    for plain in (CompletionRow("q ", "a"), ReasoningRow("q ", "r", "a")):
        assert not tokenize(plain, train_on="last").mask.all()
        assert tokenize(plain, train_on="all").mask.all()


def test_reasoning_keeps_its_weight_where_all_is_trained():
    for prompt in ("q ", talk(("user", "q"))):
        found = tokenize(ReasoningRow(prompt, "r", "a"), train_on="all", reasoning_weight=0.5)
        assert found.mask.all()
        assert found.weights[0] == 1
        weighted = np.flatnonzero(found.weights == 0.5)
        assert tokenizer(BARE_CHATML).decode(found.tokens[weighted].tolist()) == (
            "<think>\nr\n</think>\n\n"
        )


@given(st.data())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_tokens_have_the_weight_of_the_span_they_begin_in(data):
    edges = sorted(data.draw(st.sets(st.integers(0, 60), max_size=12)))
    spans = [chat.Span(a, b, float(a + 1)) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    places = sorted(data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)))))
    expected = [
        next((span.weight for span in spans if span.start <= a < span.end), 0.25) for a, _ in places
    ]
    assert chat.weights_within(places, spans, 0.25) == expected


def test_time_grows_with_the_length_of_a_conversation_and_not_with_its_square():
    used = tokenizer(tokenizers.CHATML)

    def seconds(turns: int) -> float:
        long = row(*[("user", "question " * 20), ("assistant", "answer " * 20)] * turns)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            chat.tokenize(long, used, OPTIONS)
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(160) < 8 * seconds(40)  # 4 where it is proportional, 16 where it is the square


def test_a_first_turn_by_the_assistant_leaves_its_header_out():
    turns = (("assistant", "hi"), ("user", "q"), ("assistant", "a"))
    for template in (BARE_CHATML, tokenizers.CHATML, QWEN3):
        assert trained(tokenize(row(*turns), template)) == ["hi<|im_end|>", "a<|im_end|>"]


def test_earlier_reasoning_goes_where_the_template_strips_it():
    turns = (
        ("user", "q"),
        ("assistant", "<think>\nx\n</think>\n\na"),
        ("user", "r"),
        ("assistant", "<think>\ny\n</think>\n\nb"),
    )
    used = tokenizer(QWEN3)
    example = chat.tokenize(row(*turns), used, OPTIONS)
    assert trained(example) == ["a<|im_end|>", "<think>\ny\n</think>\n\nb<|im_end|>"]
    asked = chat.question(row(*turns), used, OPTIONS)
    assert example.tokens[: len(asked.prompt)].tolist() == list(asked.prompt)


def test_earlier_reasoning_before_a_tool_call():
    called = {"role": "assistant", "content": "<think>\nx\n</think>\n\n", "tool_calls": [CALL]}
    messages = [*talk(("user", "q")), called, *talk(("tool", "1"), *TALK[2:])]
    example = tokenize(ChatRow(messages, tools=[TOOL], where="r:1"), QWEN3)
    call = '\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    assert trained(example) == [call, "bc<|im_end|>"]


def test_reasoning_that_the_template_drops_from_the_last_turn_is_an_error():
    turns = (("user", "q"), ("assistant", "<think>\nx\n</think>\n\na"))
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: .*leaves out the reasoning"):
        tokenize(row(*turns), STRIPS_ALL)


def test_template_kwargs_of_the_row_win_over_the_options():
    used = tokenizer(QWEN3)
    asked = row(("user", "q"), ("assistant", "a"), template_kwargs={"enable_thinking": False})
    options = chat.ChatOptions(template_kwargs={"enable_thinking": True})
    text = used.decode(chat.question(asked, used, options).prompt)
    assert text.endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ((("system", "s"), ("user", "q"), ("assistant", "a")), "System role not supported"),
        ((("user", "q"), ("user", "r"), ("assistant", "a")), "must alternate"),
    ],
)
def test_a_refusal_by_the_template_names_the_row(turns, said):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: .*{said}"):
        tokenize(row(*turns), GEMMA)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: .*{said}"):
        chat.question(row(*turns), tokenizer(GEMMA), OPTIONS)


def test_turns_that_cannot_be_found_are_an_error_and_no_empty_mask():
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: message 1 \(assistant\).*generation"):
        tokenize(row(*TALK), HOPELESS)


def test_no_template_is_an_error():
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: .*no chat template"):
        tokenize(row(*TALK), None)


def test_weights_and_masks_of_turns():
    example = tokenize(row(*TALK, weights=[0, 0.0, 0.0, 0.5]))
    assert trained(example) == ["bc<|im_end|>"]
    assert set(example.weights[example.mask].tolist()) == {0.5}
    example = tokenize(row(*TALK, weights=[0.25, 1.0, 0.0, 0.0]))
    assert trained(example) == ["q<|im_end|>", "a<|im_end|>"]
    assert tokenize(row(*TALK, weights=[0, 0, 0, 0])) == Dropped("fully_masked", "rows.jsonl:3")


@pytest.mark.parametrize("template", [BARE_CHATML, tokenizers.CHATML, QWEN3])
def test_parts_with_weights(template):
    parts = [
        {"type": "text", "text": "one "},
        {"type": "text", "text": "two ", "weight": 0.0},
        {"type": "text", "text": "three", "weight": 3.0},
    ]
    messages = [*talk(("user", "q")), {"role": "assistant", "content": parts}]
    example = tokenize(ChatRow(messages, weights=[0.0, 0.5], where="r:1"), template)
    assert trained(example) == ["one ", "three<|im_end|>"]
    assert example.weights[example.mask].tolist() == [0.5] * 4 + [1.5] * 6


NO_PROMPT = BARE_CHATML.partition("{%- if add_generation_prompt")[0]
THINKS = BARE_CHATML.replace(
    "{%- if message['role'] == 'assistant' -%}",
    "{%- if message['role'] == 'assistant' -%}{{- '<think>\\n\\n</think>\\n\\n' -}}",
)


@pytest.mark.parametrize("template", [NO_PROMPT, THINKS, LLAMA3])
@pytest.mark.parametrize(("read", "written"), [("a", "b"), ("think", " t"), ("\n", "assistant")])
def test_parts_are_found_in_the_message_and_not_in_what_stands_around_it(template, read, written):
    """The header spells `a` and `assistant` too, and the reasoning that the template adds `think`.

    An empty line at the beginning is trimmed by one template.
    """
    content = [
        {"type": "text", "text": read, "weight": 0.0},
        {"type": "text", "text": written, "weight": 1.0},
    ]
    messages = [*talk(("user", "q")), {"role": "assistant", "content": content}]
    found = trained(tokenize(ChatRow(messages, weights=[0.0, 1.0]), template))
    assert found == [written + "<|im_end|>"]


def test_parts_that_the_template_changes_or_repeats_are_an_error():
    content = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "weight": 0.5}]
    messages = [*talk(("user", "q")), {"role": "assistant", "content": content}]
    for change in ("| upper", "| replace(' ', '')", "* 2"):
        template = BARE_CHATML.replace("message['content']", f"(message['content'] {change})")
        with pytest.raises(ValueError, match="changes or repeats message 1, whose parts have"):
            tokenize(ChatRow(messages, weights=[0.0, 1.0]), template)


def marking(assistant):
    """ChatML with this for an assistant's turn."""
    return (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
        "{%- if m.role == 'assistant' -%}"
        + assistant
        + "{%- else -%}{{- m.content -}}{%- endif -%}"
        "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    )


WORDS = "{%- generation -%}{{- m.content -}}{%- endgeneration -%}"
TWICE = "{%- if loop.last -%}{%- generation -%}r{%- endgeneration -%}" + WORDS + "{%- else -%}"
TWICE += "{{- m.content -}}{%- endif -%}"
LAST = "{%- if loop.last -%}" + WORDS + "{%- else -%}{{- m.content -}}{%- endif -%}"


def test_generation_markers_go_to_the_turns_that_they_stand_around():
    """Two pairs around parts of the last turn are not one around each of two turns."""
    twice = r"2 pairs of .* 2 assistant turns, and they are not one"
    with pytest.raises(ValueError, match=twice):
        tokenize(row(*TALK), marking(TWICE))
    users = marking("{{- m.content -}}").replace(
        "{%- else -%}{{- m.content -}}", "{%- else -%}" + WORDS
    )
    with pytest.raises(ValueError, match=twice):
        tokenize(row(*TALK), users)
    with pytest.raises(ValueError, match=r"message 1 \(assistant\) stands between no"):
        tokenize(row(*TALK), marking(LAST))
    assert trained(tokenize(row(*TALK), marking(LAST), train_on="last")) == ["bc<|im_end|>"]


def test_only_the_assistant_of_a_completion_is_trained():
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    completion = [called, *talk(("tool", "1"), ("assistant", "a"), ("user", "r"))]
    completion += talk(("assistant", "b"))
    found = CompletionRow(talk(("user", "q"), ("assistant", "z"), ("user", "p")), completion)
    call = '\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    assert trained(tokenize(found, QWEN3)) == [call, "a<|im_end|>", "b<|im_end|>"]


def test_a_prompt_weight_trains_the_prompts_words():
    found = CompletionRow(talk(("user", "q")), talk(("assistant", "a")), prompt_weight=0.5)
    example = tokenize(found)
    assert trained(example) == ["q<|im_end|>", "a<|im_end|>"]
    assert example.weights[example.mask].tolist() == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("named", ["tool_calls", "tools"])
def test_rows_whose_tools_the_template_leaves_out_are_dropped(content, named):
    """Of a call that is not rendered, the end of the turn alone would be trained."""
    called = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    found = ChatRow([*talk(("user", "q")), called, *talk(("tool", "1"), *TALK[1:2])], where="r:1")
    if named == "tools":
        found = row(*TALK, tools=[TOOL])
    for template in (BARE_CHATML, tokenizers.CHATML):
        for options in ({}, {"train_on": "last"}, {"train_on": "all"}):
            reason = f"{named}_not_rendered"
            assert tokenize(found, template, **options) == Dropped(reason, found.where)
    assert not isinstance(tokenize(found, QWEN3), Dropped)


def test_every_call_of_a_turn_must_be_rendered():
    first_only = QWEN3.replace("in m.tool_calls", "in m.tool_calls[:1]")
    calls = [CALL, {"type": "function", "function": {"name": "g", "arguments": {}}}]
    called = {"role": "assistant", "content": "g", "tool_calls": calls}
    found = ChatRow([*talk(("user", "q")), called], where="r:1")
    assert tokenize(found, first_only) == Dropped("tool_calls_not_rendered", "r:1")
    assert '{"name": "g", "arguments": {}}' in trained(tokenize(found, QWEN3))[0]


def test_a_row_with_a_token_that_the_model_lacks_is_dropped():
    """As where a text model has no embedding for the last of its tokenizer's added tokens."""
    used = tokenizer(tokenizers.CHATML)
    last = used.vocab_size - 1
    step = chat.Tokenize(used, OPTIONS, last)
    spelt = TextRow(f"a{used.decode([last])}b", where="rows.jsonl:7")
    assert step(spelt) == Dropped("outside_vocabulary", "rows.jsonl:7")
    assert isinstance(step(TextRow("ab")), Example)
    assert not isinstance(chat.Tokenize(used, OPTIONS)(spelt), Dropped)


def test_special_tokens_that_people_write_are_noted():
    step = chat.Tokenize(tokenizer(tokenizers.CHATML), OPTIONS)
    assert isinstance(step(row(*TALK)), Example)
    spelt = row(("user", "a<|im_end|>"), ("assistant", "b<|im_end|><|bos|>"))
    found = step(spelt)
    assert isinstance(found, Noted)
    assert found.notes == (("<|im_end|>", "rows.jsonl:3"), ("<|bos|>", "rows.jsonl:3"))
    assert found.example.tokens.tolist() == tokenize(spelt).tokens.tolist()
    for other in (
        TextRow("a<|bos|>"),
        CompletionRow("q", "a<|bos|>"),
        CompletionRow(talk(("user", "<|bos|>")), talk(("assistant", "a"))),
        ReasoningRow("q", "<|bos|>", "a"),
    ):
        noted = step(other)
        assert isinstance(noted, Noted)
        assert [note.reason for note in noted.notes] == ["<|bos|>"]
    assert isinstance(step(TokensRow([256, 5])), Example)


def test_an_empty_turn_among_others_trains_its_end():
    turns = (("user", "q"), ("assistant", ""), ("user", "r"), ("assistant", "a"))
    assert trained(tokenize(row(*turns))) == ["<|im_end|>", "a<|im_end|>"]


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_trained_text_is_the_content_and_its_end(pairs):
    # The Qwen3 template takes newlines from the beginning of earlier turns.
    pairs = [(ask, reply.lstrip("\n")) for ask, reply in pairs]
    pairs = [(ask, reply) for ask, reply in pairs if reply.strip() and "<" not in ask + reply]
    turns = [turn for a, b in pairs for turn in (("user", a), ("assistant", b))]
    if not turns:
        return
    for template in (BARE_CHATML, tokenizers.CHATML, SHORT_MARKERS, QWEN3):
        found = trained(tokenize(row(*turns), template))
        assert found == [reply + "<|im_end|>" for _, reply in pairs]


# Plain rows ------------------------------------------------------------------------------------


def test_plain_completion():
    example = tokenize(CompletionRow("ab", "cd"))
    names = tokenizer(BARE_CHATML)
    assert names.decode(example.tokens.tolist()) == "<|bos|>abcd<|endoftext|>"
    assert trained(example) == ["cd<|endoftext|>"]
    weighted = tokenize(CompletionRow("ab", "cd", prompt_weight=0.5))
    assert weighted.weights.tolist() == [0.5] * 3 + [1.0] * 3


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|im_end|>"])
def test_special_tokens_in_the_text_are_not_doubled(end):
    names = tokenizer(BARE_CHATML)
    example = tokenize(CompletionRow("<|bos|>ab", "cd" + end))
    assert names.decode(example.tokens.tolist()) == f"<|bos|>abcd{end}"
    assert trained(example) == ["cd" + end]
    text = tokenize(TextRow("<|bos|>ab" + end))
    assert names.decode(text.tokens.tolist()) == f"<|bos|>ab{end}"
    assert text.mask.all()
    asked = chat.question(CompletionRow("<|bos|>ab", "c"), names, OPTIONS)
    assert names.decode(asked.prompt) == "<|bos|>ab"


def merging():
    """A tokenizer that joins "b" and "c", so that "ab" is no prefix of "abc" in tokens."""
    vocab = {piece: i for i, piece in enumerate(["a", "b", "c", "bc", "</s>"])}
    made = hf_tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("b", "c")]))
    made.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    made.add_special_tokens(["</s>"])
    config = json.dumps({"eos_token": "</s>"}).encode()
    return tokenizers.load_tokenizer_from_files(
        {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": config}
    )


def test_a_prompt_that_would_merge_with_the_completion_is_tokenised_apart():
    used = merging()
    assert used.encode("abc") == [0, 3]
    example = chat.tokenize(CompletionRow("ab", "ca"), used, OPTIONS)
    assert example.tokens.tolist() == [0, 1, 2, 0, 4]
    assert example.mask.tolist() == [False, False, True, True, True]
    assert chat.tokenize(CompletionRow("a", "bc"), used, OPTIONS).tokens.tolist() == [0, 3, 4]


def test_a_turn_that_would_merge_with_its_header_is_tokenised_in_pieces():
    files = {**merging().files, "chat_template.jinja": b"{% for m in messages %}{{ m.content }}"}
    files["chat_template.jinja"] += b"{% endfor %}"
    used = tokenizers.load_tokenizer_from_files(files)
    example = chat.tokenize(row(("user", "ab"), ("assistant", "ca")), used, OPTIONS)
    assert example.tokens.tolist() == [0, 1, 2, 0, 4]
    assert example.mask.tolist() == [False, False, True, True, True]


def test_tokens_rows():
    example = tokenize(TokensRow([5, 6, 7], [False, True, True], [1.0, 0.5, 2.0]))
    assert example.mask.tolist() == [False, True, True]
    assert example.weights.tolist() == [0.0, 0.5, 2.0]
    assert tokenize(TokensRow([5, 6])).mask.all()
    with pytest.raises(ValueError, match=r"f\.jsonl:9: token 1 is 999.*vocabulary of 260"):
        tokenize(TokensRow([5, 999], where="f.jsonl:9"))
    with pytest.raises(ValueError, match="token 0 is -1"):
        tokenize(TokensRow([-1, 5]))


# Reasoning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reasoning", "answer", "loss"), [(1.0, 1.0, 0.475), (0.5, 1.0, 0.5), (0.0, 1.0, 0.55)]
)
@pytest.mark.parametrize("conversational", [False, True])
def test_reasoning_weights(reasoning, answer, loss, conversational):
    """Losses .5 and .3 of the reasoning's tokens, .2 and .9 of the answer's, weighted."""
    prompt = talk(("user", "q")) if conversational else "q"
    example = tokenize(
        ReasoningRow(prompt, "xy", "z"),
        reasoning_weight=reasoning,
        answer_weight=answer,
        reasoning_open="",
        reasoning_close="",
    )
    start = 2 if not conversational else int(np.argmax(example.tokens == example_id("x")))
    weights = example.weights[start : start + 4]
    assert weights.sum() == example.weights.sum()
    losses = np.array([0.5, 0.3, 0.2, 0.9])
    assert (weights * losses).sum() / weights.sum() == pytest.approx(loss, abs=1e-6)


def example_id(letter):
    return tokenizer(BARE_CHATML).encode(letter)[0]


@pytest.mark.parametrize("template", [BARE_CHATML, tokenizers.CHATML, QWEN3])
def test_reasoning_between_its_tags(template):
    found = ReasoningRow(talk(("user", "q")), "why", "a")
    assert trained(tokenize(found, template)) == ["<think>\nwhy\n</think>\n\na<|im_end|>"]
    only = tokenize(found, template, reasoning_weight=0.0)
    assert trained(only) == ["a<|im_end|>"]


def test_a_template_that_drops_reasoning_is_an_error():
    with pytest.raises(ValueError, match=r"r:5: .*leaves out"):
        tokenize(ReasoningRow(talk(("user", "q")), "why", "a", where="r:5"), STRIPS_ALL)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (CompletionRow("q", "<think>\nx", where="r:1"), "unclosed_reasoning"),
        (
            ChatRow(talk(("user", "q"), ("assistant", "<think>x")), where="r:1"),
            "unclosed_reasoning",
        ),
        (CompletionRow("q", " ", where="r:1"), "empty_target"),
        (ReasoningRow("q", "x", "", where="r:1"), "empty_target"),
        (CompletionRow(talk(("user", "q")), talk(("assistant", "")), where="r:1"), "empty_target"),
        (ChatRow(talk(("user", "q")), where="r:1"), "empty_target"),
        (TextRow("", where="r:1"), "empty_target"),
        (TokensRow([], where="r:1"), "empty_target"),
        (TokensRow([5], where="r:1"), "too_short"),
        (TokensRow([5, 6], [True, False], where="r:1"), "fully_masked"),
    ],
)
def test_rows_with_nothing_to_train_are_dropped(given, reason):
    assert tokenize(given) == Dropped(reason, "r:1")


# Questions -------------------------------------------------------------------------------------


def test_questions_of_each_kind():
    used = tokenizer(BARE_CHATML)
    asked = chat.question(ReasoningRow("q", "why", "a"), used, OPTIONS)
    assert (used.decode(asked.prompt), asked.answer) == ("<|bos|>q", "a")
    parts = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    asked = chat.question(CompletionRow(parts, talk(("assistant", "a"))), used, OPTIONS)
    assert used.decode(asked.prompt) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert chat.question(TextRow("q"), used, OPTIONS) is None
    assert chat.question(row(("user", "q")), used, OPTIONS) is None
    assert chat.question(TokensRow([5, 6]), used, OPTIONS) is None


def test_the_tokenizing_step_can_be_pickled():
    step = pickle.loads(pickle.dumps(chat.Tokenize(tokenizer(QWEN3), OPTIONS)))
    assert trained(step(row(*TALK))) == ["a<|im_end|>", "bc<|im_end|>"]


def test_weights_that_are_negative_or_lost_in_float32_are_refused():
    with pytest.raises(ValueError, match="reasoning_weight is -1"):
        chat.ChatOptions(reasoning_weight=-1.0)
    with pytest.raises(
        ValueError, match=r"chat\.answer_weight: .*of 1e-06 to 1e\+06, got float 1e-38"
    ):
        chat.ChatOptions(answer_weight=1e-38)
