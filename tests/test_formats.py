"""Every known shape of row becomes one canonical row, or an error that says where and why."""

import json
import math

import pytest

from jaxpost.data import formats
from jaxpost.data.formats import ChatRow, CompletionRow, Dropped, ReasoningRow, TextRow, TokensRow

USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HERE = {"meta": {}, "where": "f:1"}


def read(row, **options):
    """The canonical row of a row, by the format that its own columns show."""
    return formats.normalize(row, formats.detect(list(row), row, where="f", **options), "f:1")


def kind(row, **options):
    return str(formats.detect(list(row), row, where="f", **options))


def problem(row, **options):
    with pytest.raises(ValueError, match=r".") as caught:
        read(row, **options)
    return str(caught.value)


def test_text():
    assert read({"text": "hello", "id": 3}) == TextRow("hello", {"id": 3}, "f:1")
    assert read({"text": ""}) == read({"text": None}) == Dropped("empty_text", "f:1")
    assert kind({"text": "hello", "id": 3}) == "text"
    assert problem({"text": 3}) == "f:1: column text: expected text, got int 3"


def test_messages_with_tools_and_template_arguments():
    row = {
        "messages": [SYSTEM, USER, ASSISTANT],
        "tools": [TOOL],
        "chat_template_kwargs": {"date": "today"},
        "enable_thinking": False,
        "source": "web",
    }
    expected = ChatRow(
        [SYSTEM, USER, ASSISTANT],
        tools=[TOOL],
        template_kwargs={"date": "today", "enable_thinking": False},
        meta={"source": "web"},
        where="f:1",
    )
    assert read(row) == expected
    text = {name: json.dumps(row[name]) for name in ("messages", "tools", "chat_template_kwargs")}
    assert read(row | text) == expected
    assert read(row | {"tools": [json.dumps(TOOL)]}) == expected
    assert read({"messages": [USER, ASSISTANT], "tools": ""}) == ChatRow([USER, ASSISTANT], **HERE)
    assert "tools: is text that is not JSON" in problem(row | {"tools": "[{"})
    assert "tools: expected a list of schemas, got a map" in problem(row | {"tools": TOOL})
    assert kind(row) == "messages"


def test_messages_win_over_prompt_and_completion():
    row = {"prompt": "p", "completion": "c", "messages": [USER, ASSISTANT], "ground_truth": "4"}
    found = read(row)
    assert isinstance(found, ChatRow)
    assert found.meta == {"prompt": "p", "completion": "c", "ground_truth": "4"}


def test_share_gpt_conversations():
    row = {
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4"},
        ],
        "system": "Be brief.",
        "tools": json.dumps([TOOL]),
    }
    found = read(row)
    assert found.messages == [
        SYSTEM,
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        ASSISTANT,
    ]
    assert found.tools == [TOOL]
    assert found.weights is None
    assert found.meta == {}


def test_a_call_that_is_not_json_stays_text():
    row = {"conversations": [{"from": "function_call", "value": "add(2, 2)"}]}
    assert read(row).messages == [{"role": "assistant", "content": "add(2, 2)"}]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *[("human", "user"), ("User", "user"), ("gpt", "assistant"), ("model", "assistant")],
        *[("observation", "tool"), ("function-response", "tool"), ("ipython", "tool")],
        *[("developer", "developer"), ("system", "system")],
    ],
)
def test_role_names(name, role):
    assert read({"messages": [{"from": name, "value": "x"}]}).messages[0]["role"] == role


def test_tool_calls_take_one_form():
    text = {"id": "1", "type": "function"}
    text["function"] = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    bare = {"name": "add", "arguments": {"a": 2, "b": 2}}
    null = {"role": "assistant", "content": None, "tool_calls": [text, bare], "name": None}
    (message,) = read({"messages": [null]}).messages
    assert message == {"role": "assistant", "tool_calls": [CALL | {"id": "1"}, CALL]}


def test_messages_keep_what_templates_read():
    message = {"role": "assistant", "content": "4", "thinking": "two and two", "name": "calc"}
    assert read({"messages": [message]}).messages == [message]
    silent = {"role": "assistant", "reasoning_content": "hm"}
    assert read({"messages": [silent]}).messages == [silent]


def test_text_parts_are_joined_and_weighted_ones_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "ab"
    parts[1]["weight"] = 0.5
    assert read({"messages": [{"role": "assistant", "content": parts}]}).messages == [
        {"role": "assistant", "content": parts}
    ]


def test_images_are_refused_by_name():
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    row = {"messages": [{"role": "user", "content": parts}]}
    assert "f:1: column messages: message 0: content: a part of type image" in problem(row)
    assert "column images is not empty" in problem({"text": "x", "images": ["a.png"]})
    assert read({"text": "x", "images": [], "image": None}).text == "x"


def test_weights_of_messages():
    user, heavy = {**USER, "weight": 1}, {**ASSISTANT, "weight": 0.5}
    skipped = {**ASSISTANT, "train": False}
    found = read({"messages": [USER, heavy, USER, ASSISTANT, user, skipped]})
    assert found.weights == [0.0, 0.5, 0.0, 1.0, 1.0, 0.0]
    assert found.messages == [USER, ASSISTANT] * 3
    chat = [USER, ASSISTANT, USER, ASSISTANT]
    assert read({"messages": chat, "weights": [0, 1, 0, 0.5]}).weights == [0, 1, 0, 0.5]
    assert read({"messages": chat, "turn_mask": [True, False]}).weights == [0, 0, 0, 1]
    both = read({"messages": chat, "turn_mask": [True, False], "weights": [1, 2]})
    assert both.weights == [0, 0, 0, 2]
    wrong = {"messages": chat, "turn_mask": [True, False, True, False]}
    assert "column turn_mask: expected 2, one an assistant's message" in problem(wrong)
    with_system = {"messages": chat, "weights": [0, 1, 0, 1], "system": "Be brief."}
    assert read(with_system).weights == [0, 0, 1, 0, 1]
    assert "expected 4 numbers, one a message, or 2" in problem({"messages": chat, "weights": [1]})
    assert "expected a weight of 0, or of 1e-06 to 1e+06, got int -1" in problem(
        {"messages": [{**ASSISTANT, "weight": -1}]}
    )
    assert "got float nan" in problem({"messages": chat, "weights": [math.nan] * 4})


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "is text that is not JSON"),
        ({"role": "user"}, "expected a list of messages, got a map"),
        ([USER, "hi"], "message 1: expected a map with role and content, got text 'hi'"),
        ([{"content": "x"}], "message 0: expected a role among system, developer, user"),
        ([{"role": "usr", "content": "x"}], "got 'usr'; did you mean user?"),
        ([{"role": 3, "content": "x"}], "got the role int 3"),
        ([{"role": "user"}], "message 0: the user's message has neither content nor tool_calls"),
        ([{"role": "user", "content": 3}], "content: expected text or a list of parts, got int 3"),
        ([{"role": "assistant", "tool_calls": [3]}], "tool_calls: expected a map, got int 3"),
        ([{"role": "assistant", "tool_calls": [{}]}], "expected a function's name"),
    ],
)
def test_malformed_messages(messages, words):
    assert "f:1: column messages: " in problem({"messages": messages})
    assert words in problem({"messages": messages})


@pytest.mark.parametrize("part", ["prompt", "completion"])
def test_a_number_is_no_prompt_and_no_completion(part):
    words = f"f:1: column {part}: expected text or a list of messages, got float 1.5"
    assert words in problem({"prompt": "q", "completion": "a"} | {part: 1.5})


def test_arguments_of_a_call_that_cannot_be_read_stay_text():
    for arguments in ("[" * 10**5, "1" * 5000):
        call = {"function": {"name": "f", "arguments": arguments}}
        found = read({"messages": [{"role": "assistant", "tool_calls": [call]}]})
        assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_no_messages_are_dropped():
    assert read({"messages": []}) == read({"messages": None}) == Dropped("empty_messages", "f:1")


def test_prompt_completion():
    assert read({"prompt": "p", "completion": "c"}) == CompletionRow("p", "c", **HERE)
    assert read({"prompt": None, "completion": "c"}).prompt == ""
    assert read({"prompt": "p", "response": "c"}) == CompletionRow("p", "c", **HERE)
    assert read({"input": "p", "output": "c"}) == CompletionRow("p", "c", **HERE)
    weighted = read({"prompt": "p", "completion": "c", "prompt_weight": 0.1})
    assert weighted.prompt_weight == 0.1
    for empty in ("", None, []):
        assert read({"prompt": "p", "completion": empty}) == Dropped("empty_target", "f:1")
    assert kind({"prompt": "p", "completion": "c"}) == "prompt-completion (plain)"
    assert "completion: expected text or a list of messages, got int 3" in problem(
        {"prompt": "p", "completion": 3}
    )


def test_prompt_completion_in_messages():
    expected = CompletionRow([USER], [ASSISTANT], **HERE)
    assert read({"prompt": [USER], "completion": [ASSISTANT]}) == expected
    assert read({"prompt": [USER], "completion": "4"}) == expected
    assert read({"prompt": "2+2?", "completion": [ASSISTANT]}) == expected
    assert read({"prompt": "2+2?", "completion": ASSISTANT}) == expected
    assert read({"prompt": "2+2?", "completion": "4"}, chat=True) == expected
    row = {"prompt": [USER], "completion": [ASSISTANT], "tools": [TOOL]}
    assert read(row).tools == [TOOL]
    assert kind(row) == "prompt-completion (conversational)"
    assert kind({"prompt": "p", "completion": "c"}, chat=True).endswith("(conversational)")


def test_weights_in_a_completion_are_kept():
    row = {"prompt": "2+2?", "completion": [{**ASSISTANT, "weight": 0.5}, USER, ASSISTANT]}
    assert read(row) == ChatRow(
        [USER, ASSISTANT, USER, ASSISTANT], weights=[0.0, 0.5, 0.0, 1.0], **HERE
    )
    assert read(row | {"prompt_weight": 0.1}).weights == [0.1, 0.5, 0.0, 1.0]


def test_a_label_that_is_an_answer_is_metadata():
    assert read({"prompt": "p", "completion": "c", "label": "42"}).meta == {"label": "42"}


def test_questions_are_turns():
    expected = CompletionRow([USER], [ASSISTANT], **HERE)
    assert read({"question": "2+2?", "answer": "4"}) == expected
    assert read({"question": "2+2?", "answer": 4}) == expected
    assert read({"problem": "2+2?", "solution": "4"}) == expected
    assert read({"question": "2+2?", "answer": "4", "system": "Be brief."}).prompt == [SYSTEM, USER]
    assert read({"question": "q", "answer": "a"}, chat=False) == CompletionRow("q", "a", **HERE)
    assert read({"question": "", "answer": "a"}) == Dropped("empty_prompt", "f:1")
    assert read({"question": "q", "answer": ""}) == Dropped("empty_target", "f:1")


def test_alpaca():
    row = {"instruction": "Add.", "input": "2 2", "output": "4", "text": "Below is …"}
    found = read(row)
    assert found.prompt == [{"role": "user", "content": "Add.\n\n2 2"}]
    assert found.completion == [ASSISTANT]
    assert found.meta == {"text": "Below is …"}
    assert kind(row) == "alpaca (conversational)"
    assert read({"instruction": "2+2?", "input": "", "output": "4"}).prompt == [USER]
    past = {"instruction": "2+2?", "output": "4", "history": [["1+1?", "2"]]}
    assert [message["content"] for message in read(past).prompt] == ["1+1?", "2", "2+2?"]
    plain = read({"instruction": "a", "input": "b", "output": "c"}, chat=False)
    assert (plain.prompt, plain.completion) == ("a\n\nb", "c")
    assert "history: needs chat" in problem(past, chat=False)
    assert "history: item 0 is no pair" in problem(past | {"history": [["x"]]})


def test_reasoning():
    row = {"prompt": "2+2?", "reasoning": "two twos", "answer": "4"}
    assert read(row) == ReasoningRow("2+2?", "two twos", "4", **HERE)
    assert read(row, chat=True).prompt == [USER]
    assert read(row | {"reasoning": None}).reasoning == ""
    assert read(row | {"answer": None}) == Dropped("empty_target", "f:1")
    other = {"question": "2+2?", "thinking": "two twos", "response": "4"}
    assert read(other) == ReasoningRow("2+2?", "two twos", "4", **HERE)
    assert read(row | {"prompt": [USER]}).prompt == [USER]


def test_tokens():
    row = {"input_ids": [5, 6, 7]}
    assert read(row) == TokensRow([5, 6, 7], None, None, **HERE)
    assert read(row | {"labels": [-100, 6, 7]}).mask == [False, True, True]
    assert read(row | {"completion_mask": [0, 0, 1]}).mask == [False, False, True]
    both = {"assistant_masks": [0, 1, 1], "labels": [-100, -100, 7]}
    assert read(row | both).mask == [False, False, True]
    assert read(row | {"weights": [0, 1, 0.5]}).weights == [0.0, 1.0, 0.5]
    assert read({"input_ids": []}) == Dropped("empty_tokens", "f:1")


def test_padding_of_tokens_is_taken_off():
    row = {"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "labels": [0, -100, 6, 0]}
    found = read(row)
    assert (found.tokens, found.mask) == ([5, 6], [False, True])
    assert read(row | {"attention_mask": [0] * 4}) == Dropped("empty_tokens", "f:1")
    assert "only padding may be 0" in problem(row | {"attention_mask": [1, 0, 1, 1]})


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"labels": [6, 7, -100]}, "label 0 is 6 and the token there is 5; labels are the tokens"),
        ({"labels": [5, 6]}, "column labels: expected 3 entries as in input_ids, got a list of 2"),
        ({"completion_mask": [0, 1, 2]}, "expected 0 and 1 only"),
        ({"weights": [0, 1, -1]}, "expected a weight of 0, or of 1e-06 to 1e+06, got int -1"),
        ({"input_ids": [5, -6, 7]}, "column input_ids: token 1 is negative"),
        ({"input_ids": [5, 6.0]}, "column input_ids: expected a list of integers"),
        ({"input_ids": "x"}, "column input_ids: is text that is not JSON"),
        ({"input_ids": [5, 10**30, 7]}, "column input_ids: token 1 is over 2147483647"),
        ({"weights": [0, 1, 3e38]}, "of 1e-06 to 1e+06, got float 3e+38"),
        ({"weights": [0, 1, 1e-38]}, "of 1e-06 to 1e+06, got float 1e-38"),
        (
            {"weights": [0, 1, 1e39]},
            "expected a weight of 0, or of 1e-06 to 1e+06, got float 1e+39",
        ),
        (
            {"weights": [0, 1, 10**400]},
            "expected a weight of 0, or of 1e-06 to 1e+06, got int 1000",
        ),
        ({"position_ids": [0, 1, 0]}, "restart within the row"),
        ({"seq_lengths": [2, 1]}, "several sequences in a row"),
    ],
)
def test_malformed_tokens(columns, words):
    assert words in problem({"input_ids": [5, 6, 7]} | columns)


def test_columns_may_go_by_other_names():
    row = {"q": "2+2?", "best": {"text": "4"}, "prompt": "another", "messages": "free text"}
    found = read(row, overrides={"prompt": "q", "completion": "best.text"})
    assert (found.prompt, found.completion) == ("2+2?", "4")
    assert found.meta == {name: row[name] for name in ("best", "prompt", "messages")}
    verl = {"data_source": "gsm8k", "prompt": [USER], "extra_info": {"answer": "4"}}
    found = read(verl, overrides={"completion": "extra_info.answer"})
    assert found.completion == [ASSISTANT]
    words = problem(row, overrides={"prompt": "qq"})
    assert "f: columns: prompt: there is no column qq among q, best, prompt, messages" in words
    words = problem(row, overrides={"promt": "q"})
    assert "columns: promt is none of" in words
    assert "did you mean prompt?" in words


def test_a_named_format_takes_no_other():
    row = {"messages": [USER], "text": "hello"}
    assert isinstance(read(row, name="text"), TextRow)
    words = problem(row, name="mesages")
    assert "expected auto or one of tokens, messages, " in words
    assert "got mesages; did you mean messages?" in words
    assert "of no type that this recipe reads" in problem(row, name="alpaca")
    unpaired = {"prompt": "p", "completion": "c", "label": True}
    assert read(unpaired, name="prompt-completion").completion == "c"


def test_unknown_columns_are_listed_with_the_types():
    words = problem({"id": 1, "best": "x"})
    assert words.startswith("f: columns id, best are of no type that this recipe reads, which are")
    for name in ("tokens: input_ids", "messages: messages (or conversations", "text: text"):
        assert name in words
    assert "columns: {prompt: question" in words


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "preference rows, which a preference"),
        ({"chosen": [USER], "rejected": [USER]}, "dpo, reward_model"),
        ({"prompt": "p", "completion": "c", "label": True}, "unpaired preference rows"),
        ({"prompt": "p", "completions": ["a"], "labels": [True]}, "stepwise rows"),
        (
            {"data_source": "x", "prompt": [USER], "reward_model": {"ground_truth": "4"}},
            "prompt-only rows, which a reinforcement learning recipe (grpo, ppo, pmd) reads",
        ),
    ],
)
def test_rows_of_other_recipes_are_named(row, words):
    assert words in problem(row)


def test_a_row_that_lacks_a_column():
    found = formats.detect(["prompt", "completion"], {"prompt": "p", "completion": "c"})
    with pytest.raises(ValueError, match="g:7: no column completion, which prompt-completion rows"):
        formats.normalize({"prompt": "p"}, found, "g:7")


def test_another_recipe_brings_its_own_kinds():
    pair = formats.Kind(
        "preference",
        {"prompt": ("prompt",), "chosen": ("chosen",), "rejected": ("rejected",)},
        lambda cells: (cells.text("prompt"), cells.text("chosen"), cells.text("rejected")),
    )
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert read(row, accept=[pair]) == ("p", "a", "b")
