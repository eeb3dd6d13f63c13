"""Files that compare completions to batches: one prompt for both sides, and what is trained."""

import dataclasses
import itertools
import json
import math
import pathlib

import numpy as np
import pytest
import tokenizers as hf_tokenizers
from pyarrow import Table, parquet
from tokenizers import models, pre_tokenizers

from jaxpost import batch as batches
from jaxpost import compact, train_step
from jaxpost.data import preference_rows, preferences, sources, tokenizers
from jaxpost.data.preferences import Batching, PairConfig, PreferenceConfig, RankingConfig
from jaxpost.data.rows import ComparedRow, Dropped

BYTES = tokenizers.load_tokenizer_from_files(tokenizers.byte_tokenizer())
END = "<|endoftext|>"
TURN = "<|im_end|>"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def templated(template):
    files = {**tokenizers.byte_tokenizer(), "chat_template.jinja": template.encode()}
    return tokenizers.load_tokenizer_from_files(files)


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


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def talk(*contents, system=None):
    roles = itertools.cycle(("user", "assistant"))
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    return ([{"role": "system", "content": system}] if system else []) + messages


def said(*contents):
    """Turns that begin with the assistant's."""
    return talk("", *contents)[1:]


def read(tmp_path, rows, kind=preferences.pairs, tokenizer=BYTES, batching=None, **settings):
    """What one pass over some rows gives: (batch, report), all in one batch."""
    config = {
        preferences.pairs: PairConfig,
        preferences.rankings: RankingConfig,
        preferences.unpaired: PreferenceConfig,
        preferences.steps: preferences.StepConfig,
    }[kind]
    path = write(tmp_path / "a.jsonl", rows)
    batching = batching or Batching(16, once=True)
    return next(kind(config(path, **{"max_length": 160, **settings}), tokenizer, batching))


def texts(tokens, names=BYTES):
    """(what is read first, the runs that are trained) of each sequence of a batch [B, T]."""
    found = []
    for inputs, targets, mask, _, segments, positions in zip(*batches.flat(tokens), strict=True):
        count = int(segments.sum())
        assert positions[:count].tolist() == list(range(count))
        assert segments[:count].all()
        assert not mask[count:].any()
        if not count:
            continue
        first = int(mask.argmax())
        runs = [list(run) for on, run in itertools.groupby(range(count), mask.__getitem__) if on]
        trained = [names.decode(targets[run].tolist()) for run in runs]
        found.append((names.decode(inputs[: first + 1].tolist()), *trained))
    return found


def fate(tmp_path, row, **options):
    """The reasons for which a row is dropped, or its texts."""
    try:
        batch, report = read(tmp_path, [row], **options)
    except ValueError as error:
        if "every one of the last 1 rows was dropped" not in str(error):
            raise
        return str(error).split("data: ")[1].split(" (")[0]
    assert not report.dropped
    return texts(batch.tokens)


# Rows of every shape ---------------------------------------------------------------------------

PLAIN = [("<|bos|>2+2?", " 4" + END), ("<|bos|>2+2?", " five" + END)]
HEAD = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
CHAT = [(HEAD, "4" + TURN), (HEAD, "five" + TURN)]
BRIEF = "<|im_start|>system\nBrief.<|im_end|>\n"
HH = {
    "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4",
    "rejected": "\n\nHuman: 2+2?\n\nAssistant: five",
}
HH_HEAD = "<|bos|>\n\nHuman: 2+2?\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2+2?", "chosen": " 4", "rejected": " five"}, PLAIN),
        ({"chosen": "2+2? 4", "rejected": "2+2? five"}, [(p + " ", c[1:]) for p, c in PLAIN]),
        ({"prompt": talk("2+2?"), "chosen": said("4"), "rejected": said("five")}, CHAT),
        ({"prompt": talk("2+2?"), "chosen": "4", "rejected": said("five")[0]}, CHAT),
        ({"chosen": talk("2+2?", "4"), "rejected": talk("2+2?", "five")}, CHAT),
        (
            {
                "prompt": "2+2?",
                "prompt_id": "1",
                "chosen": talk("2+2?", "4"),
                "rejected": talk("2+2?", "five"),
                "messages": talk("2+2?", "4"),
                "score_chosen": 8.5,
                "score_rejected": 6.0,
            },
            CHAT,
        ),
        (
            {"system": "Brief.", "question": "2+2?", "chosen": "4", "rejected": "five"},
            [(BRIEF + HEAD, "4" + TURN), (BRIEF + HEAD, "five" + TURN)],
        ),
        (HH, [(HH_HEAD, " 4" + END), (HH_HEAD, " five" + END)]),
        (
            {
                "prompt": talk("2+2?"),
                "chosen": said("4", "sure?", "yes"),
                "rejected": said("five"),
            },
            [(HEAD, "4" + TURN, "yes" + TURN), (HEAD, "five" + TURN)],
        ),
        (
            {"prompt_ids": [65, 66], "chosen_ids": [67, 68], "rejected_ids": [69]},
            [(BYTES.decode([65, 66]), BYTES.decode([67, 68])), (BYTES.decode([65, 66]),
             BYTES.decode([69]))],
        ),
    ],
)  # fmt: skip
def test_pairs_of_every_shape(tmp_path, row, expected):
    assert fate(tmp_path, row) == expected


def test_plain_rows_and_dialogues_can_be_made_turns(tmp_path):
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "five"}
    assert fate(tmp_path, row, as_chat=True) == CHAT
    assert fate(tmp_path, HH, as_chat=True) == CHAT
    with pytest.raises(ValueError, match=r"a\.jsonl:1: column chosen: is text of no turns"):
        read(tmp_path, [{"chosen": "ab", "rejected": "ac"}], as_chat=True)


def test_a_column_store_gives_the_same(tmp_path):
    rows = [{"chosen": talk("2+2?", "4"), "rejected": talk("2+2?", "five"), "margin": 0.5}] * 2
    path = tmp_path / "a.parquet"
    parquet.write_table(Table.from_pylist(rows), path)
    batch, _ = next(preferences.pairs(PairConfig(str(path)), BYTES, Batching(2, once=True)))
    assert texts(batch.tokens) == CHAT * 2
    assert batch.margins.tolist() == [0.5, 0.5]


def test_what_a_dialogue_says():
    text = "Be kind.\n\nHuman: hi\n\nAssistant: Hello. \n\nHuman:\n\nAssistant:"
    assert preference_rows.dialogue(text) == [
        {"role": "system", "content": "Be kind."},
        *talk("hi", "Hello.", "", ""),
    ]


def test_a_margin_is_given_or_the_difference_of_scores(tmp_path):
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    scored = row | {"score_chosen": 8.5, "score_rejected": 6}
    rows = [row | {"margin": 0.25}, scored | {"margin": 3}, scored | {"margin": None}]
    for scores, last in ((True, 2.5), (False, 0.0)):
        batch, _ = read(tmp_path, rows, score_margins=scores)
        assert batch.margins.tolist()[:4] == [0.25, 3.0, last, 0.0]
        assert batch.rows.tolist()[:4] == [0, 1, 2, -1]
        assert batch.weights.tolist()[:4] == [1.0, 1.0, 1.0, 0.0]


# What becomes of pairs that are not worth comparing --------------------------------------------

PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
QWEN = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- set content = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < ns.last -%}
{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (PAIR | {"rejected": "a"}, "1 identical"),
        ({"chosen": "ab", "rejected": "ab"}, "1 identical"),
        ({"chosen": talk("q", "a"), "rejected": talk("q", "a")}, "1 identical"),
        ({"prompt": talk("q"), "chosen": said("a"), "rejected": said("a")}, "1 identical"),
        ({"chosen": HH["chosen"], "rejected": HH["chosen"]}, "1 identical"),
        (PAIR | {"chosen": ""}, "1 empty_target"),
        (PAIR | {"rejected": None}, "1 empty_target"),
        (PAIR | {"rejected": " \n"}, "1 empty_target"),
        ({"chosen": "ab", "rejected": "abc"}, "1 empty_target"),
        ({"prompt": talk("q"), "chosen": said("a"), "rejected": said("")}, "1 empty_target"),
        ({"chosen": talk("q", "a"), "rejected": talk("q")}, "1 empty_target"),
        (PAIR | {"score_chosen": 1, "score_rejected": 1.0}, "1 tie"),
        (PAIR | {"score_chosen": 0, "score_rejected": 0}, "1 tie"),
        (PAIR | {"score_chosen": 0, "score_rejected": 1}, "1 misordered"),
        ({"chosen": talk("q", "a"), "rejected": talk("p", "a")}, "1 prompts_differ"),
        (
            {"chosen": talk("q", "a", "r", "b"), "rejected": talk("q", "a", "s", "b")},
            "1 prompts_differ",
        ),
        (
            {"chosen": HH["chosen"] + "\n\nHuman: ok\n\nAssistant: ok", "rejected": HH["rejected"]},
            "1 several_turns",
        ),
        (
            {"chosen": HH["chosen"], "rejected": "\n\nHuman: 3+3?\n\nAssistant: 6"},
            "1 several_turns",
        ),
        (
            {"chosen": HH["chosen"] + "\n\nHuman: a", "rejected": HH["chosen"] + "\n\nHuman: b"},
            "1 prompts_differ",
        ),
        ({"prompt_ids": [5], "chosen_ids": [], "rejected_ids": [6]}, "1 empty_target"),
    ],
)
def test_pairs_that_are_dropped(tmp_path, row, reason):
    assert fate(tmp_path, row) == reason


def test_a_prompt_that_the_template_reads_differently_for_one_side_is_not_compared(tmp_path):
    """A later question strips the reasoning of the turns before it, on the side that has it."""
    names = templated(QWEN)
    prompt = [*talk("q"), *said("<think>x</think>a")]
    row = {"prompt": prompt, "chosen": said("b"), "rejected": said("c", "s", "d")}
    assert fate(tmp_path, row, tokenizer=names) == "1 prompts_differ"
    found = fate(tmp_path, row | {"rejected": said("c")}, tokenizer=names)
    assert [side[1] for side in found] == ["b" + TURN, "c" + TURN]


def test_reasoning_that_a_rejected_side_leaves_open_is_trained(tmp_path):
    row = {"prompt": talk("q"), "chosen": said("<think>\nx\n</think>\n\na"),
           "rejected": said("<think>\nx")}  # fmt: skip
    assert fate(tmp_path, row)[1][1] == "<think>\nx" + TURN


def test_a_token_that_the_model_lacks_drops_the_pair(tmp_path):
    rows = [PAIR, PAIR | {"rejected": TURN + "b"}]
    batching = Batching(4, once=True, vocab_size=BYTES.encode(TURN)[0])
    batch, report = read(tmp_path, rows, batching=batching)
    assert report.dropped == {"outside_vocabulary": 1}
    assert batch.rows.tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (PAIR | {"chosen": 3}, r"a\.jsonl:1: column chosen: expected text or a list of messages"),
        (PAIR | {"margin": "x"}, r"a\.jsonl:1: column margin: expected a number, got text 'x'"),
        (PAIR | {"margin": True}, r"a\.jsonl:1: column margin: expected a number, got bool"),
        (
            {"prompt": "q", "chosen": [{"role": "assistant", "content": "a", "weight": 2}],
             "rejected": "b"},
            r"a\.jsonl:1: column chosen: messages that are compared have no weights",
        ),
        ({"prompt": "q", "completion": "a", "label": True}, "unpaired preference rows, which"),
        ({"question": "q", "best": "a"}, "are prompt-only rows, which"),
        ({"better": "q", "worse": "a"}, "are of no type that this recipe reads"),
        (PAIR | {"images": ["x"]}, "column images is not empty"),
    ],
)  # fmt: skip
def test_malformed_pairs_name_file_line_and_column(tmp_path, row, words):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, [row])


def test_malformed_rows_can_be_dropped_and_are_counted(tmp_path):
    rows = [PAIR, PAIR | {"chosen": 3}, {"chosen": "ab"}, PAIR | {"rejected": "a"}]
    batch, report = read(tmp_path, rows, malformed="drop")
    assert report.dropped == {"malformed": 2, "identical": 1}
    assert batch.rows.tolist()[:2] == [0, -1]


# Tokens and masks ------------------------------------------------------------------------------


def test_the_prompt_has_the_same_tokens_where_only_one_side_would_merge_with_it(tmp_path):
    row = {"prompt": "ab", "chosen": "ca", "rejected": "ba"}
    batch, _ = read(tmp_path, [row], tokenizer=merging())
    assert batch.tokens.inputs[0, :, :2].tolist() == [[0, 1], [0, 1]]
    assert texts(batch.tokens, merging()) == [("a b", "c a </s>"), ("a b", "b a </s>")]


def test_without_a_prompt_the_shared_beginning_is_found_in_tokens(tmp_path):
    """Letter by letter the texts share "ab", which no token ends after."""
    batch, _ = read(tmp_path, [{"chosen": "abc", "rejected": "aba"}], tokenizer=merging())
    assert texts(batch.tokens, merging()) == [("a", "bc </s>"), ("a", "b a </s>")]


def test_words_that_both_sides_begin_with_are_trained_unless_they_count_as_prompt(tmp_path):
    row = {"prompt": "q ", "chosen": "so yes", "rejected": "so no"}
    assert fate(tmp_path, row) == [("<|bos|>q ", s + END) for s in ("so yes", "so no")]
    found = fate(tmp_path, row, mask_shared=True)
    assert found == [("<|bos|>q so ", s + END) for s in ("yes", "no")]
    ended = fate(tmp_path, row | {"rejected": "so"}, mask_shared=True)
    assert ended == [("<|bos|>q so", " yes" + END), ("<|bos|>q so", END)]


def test_an_end_that_the_text_spells_is_not_doubled(tmp_path):
    row = {"prompt": "q", "chosen": "a" + END, "rejected": "b"}
    assert fate(tmp_path, row) == [("<|bos|>q", "a" + END), ("<|bos|>q", "b" + END)]


def test_the_whole_is_the_prompt_and_the_completion(tmp_path):
    """Also where the prompt for a new turn opens reasoning, and the turn closes it."""
    template = QWEN.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    names = templated(template)
    sides = [said("<think>x</think>a"), said("<think>y</think>b")]
    row = {"prompt": talk("q"), "chosen": sides[0], "rejected": sides[1]}
    batch, _ = read(tmp_path, [row], tokenizer=names)
    for place, side in enumerate(sides):
        whole = names.encode(names.render([*talk("q"), *side]))
        count = int(batch.tokens.segment_ids[0, place].sum())
        assert batch.tokens.inputs[0, place, :count].tolist() == whole[:-1]
    assert [side[1] for side in texts(batch.tokens)] == ["x</think>a" + TURN, "y</think>b" + TURN]


def test_a_step_goes_on_after_right_ones_and_has_no_end(tmp_path):
    row = {
        "prompt": "2+2+2?",
        "initial_reason_steps": "2+2=4.\n",
        "chosen": "4+2=6.",
        "rejected": "4+2=7.",
    }
    head = HEAD.replace("2+2?", "2+2+2?") + "2+2=4.\n"
    assert fate(tmp_path, row) == [(head, "4+2=6."), (head, "4+2=7.")]
    plain = "<|bos|>2+2+2?2+2=4.\n"
    assert fate(tmp_path, row, as_chat=False) == [(plain, "4+2=6."), (plain, "4+2=7.")]
    first = fate(tmp_path, row | {"initial_reason_steps": ""})
    assert first == [(head.removesuffix("2+2=4.\n"), s) for s in ("4+2=6.", "4+2=7.")]
    assert fate(tmp_path, row | {"rejected": row["chosen"]}) == "1 identical"


# As TRL's trainers have them: `golden/make_preference.py`.
TRL_PAIRS = [
    ("3 14 15 9", " 20 8 41", " 6"),
    ("26 5 35 8 9 7 9", " 33 2", " 40 17 33 9 22"),
    ("32 38", " 7 45 12 12 30", " 7 45 31"),
    ("46 26 43 38", " 19 4 28", " 11 24 36"),
]
GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "preference.json").read_text())


def numbers():
    """A tokenizer of words that are numbers, which are their tokens."""
    words = {"padding": 0, "eos": 1} | {str(n): n for n in range(2, 48)}
    made = hf_tokenizers.Tokenizer(models.WordLevel(words, unk_token="padding"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["padding", "eos"])
    config = json.dumps({"eos_token": "eos", "pad_token": "padding"}).encode()
    return tokenizers.load_tokenizer_from_files(
        {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": config}
    )


def ids(tokens):
    """(prompt, completion) of each sequence."""
    found = []
    for inputs, targets, mask, *_ in zip(*batches.flat(tokens), strict=True):
        found.append((inputs[: mask.argmax() + 1].tolist(), targets[mask].tolist()))
    return found


def test_tokens_are_those_of_trl(tmp_path):
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in TRL_PAIRS]
    batch, _ = read(tmp_path, rows, tokenizer=numbers(), batching=Batching(4, once=True))
    golden = GOLDEN["tokens_dpo"]
    sides = zip(golden["chosen_ids"], golden["rejected_ids"], strict=True)
    prompts = [prompt for prompt in golden["prompt_ids"] for _ in range(2)]
    assert ids(batch.tokens) == list(zip(prompts, itertools.chain(*sides), strict=True))
    batching = Batching(4, once=True, read_end=True)
    batch, _ = read(tmp_path, rows, tokenizer=numbers(), batching=batching)
    for place, side in enumerate(("chosen_ids", "rejected_ids")):
        for row, whole in enumerate(GOLDEN["tokens_reward"][side]):
            end = int(batch.ends[row, place])
            assert batch.tokens.inputs[row, place, : end + 1].tolist() == whole
    rows = [{"prompt": p, "completion": c, "label": True} for p, c, _ in TRL_PAIRS[:3]]
    rows += [{"prompt": p, "completion": r, "label": False} for p, _, r in TRL_PAIRS[1:]]
    batching = Batching(6, once=True)
    batch, _ = read(tmp_path, rows, preferences.unpaired, numbers(), batching)
    golden, prompts = GOLDEN["tokens_kto"], GOLDEN["tokens_kto"]["prompt_ids"]
    assert ids(batch.tokens) == list(zip(prompts, golden["completion_ids"], strict=True))
    assert ids(batch.mismatched) == list(zip(prompts, golden["KL_completion_ids"], strict=True))
    assert batch.labels.tolist() == GOLDEN["labels"]


# Too long --------------------------------------------------------------------------------------
# <|bos|> 01234567 and a completion with its end: 9 + n + 1 tokens, one target less.


@pytest.mark.parametrize(
    ("too_long", "length", "chosen", "rejected", "expected"),
    [
        (
            "drop",
            12,
            "abc",
            "d",
            [("<|bos|>01234567", "abc" + END), ("<|bos|>01234567", "d" + END)],
        ),
        ("drop", 11, "abc", "d", "1 too_long"),
        ("drop", 11, "d", "abc", "1 too_long"),
        (
            "keep_end",
            10,
            "abc",
            "d",
            [("<|bos|>234567", "abc" + END), ("<|bos|>234567", "d" + END)],
        ),
        ("keep_end", 5, "abc", "d", [("<|bos|>7", "abc" + END), ("<|bos|>7", "d" + END)]),
        ("keep_end", 4, "abc", "d", "1 too_long"),
        ("keep_start", 11, "abc", "d", "1 ends_differ"),
        ("keep_start", 9, "abc", "de", [("<|bos|>01234567", "a"), ("<|bos|>01234567", "d")]),
        ("keep_start", 9, "abc", "ad", "1 identical"),
        ("keep_start", 8, "abc", "de", "1 too_long"),
    ],
)
def test_no_side_is_cut_alone(tmp_path, too_long, length, chosen, rejected, expected):
    row = {"prompt": "01234567", "chosen": chosen, "rejected": rejected}
    assert fate(tmp_path, row, too_long=too_long, max_length=length) == expected


def test_too_long_may_be_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl:1: 5 tokens with the prompt, where there is"):
        read(tmp_path, [PAIR | {"chosen": "aa"}], too_long="error", max_length=3)


def test_where_the_end_is_read_it_has_room_and_is_never_cut(tmp_path):
    batching = Batching(1, once=True, read_end=True)
    batch, _ = read(tmp_path, [PAIR], batching=batching, max_length=4)
    assert batch.tokens.inputs.shape == (1, 2, 4)
    assert batch.ends.tolist() == [[3, 3]]
    ends = np.take_along_axis(batch.tokens.inputs, batch.ends[..., None], axis=-1)
    assert (ends == BYTES.eos_id).all()
    assert texts(batch.tokens) == [("<|bos|>q", "a" + END), ("<|bos|>q", "b" + END)]
    with pytest.raises(ValueError, match="every one of the last 1 rows was dropped"):
        read(tmp_path, [PAIR], batching=batching, max_length=3)
    with pytest.raises(ValueError, match="keep_start, which cuts the ends"):
        read(tmp_path, [PAIR], batching=batching, too_long="keep_start")


# Rankings --------------------------------------------------------------------------------------

RANKED = {"prompt": "q", "completions": ["c", "a", "b"], "scores": [1, 3.5, 2]}


def order(batch):
    return [side[1].removesuffix(END) for side in texts(batch.tokens)]


@pytest.mark.parametrize(
    "row",
    [
        RANKED,
        RANKED | {"scores": None, "ranks": [3, 1, 2]},
        {"prompt": "q", "answers": [{"answer": "c", "rank": 3}, {"answer": "a", "rank": 1},
                                    {"answer": "b", "rank": 2}]},
        {"prompt": "q", "responses": [{"text": "c", "score": 0.0}, {"text": "a", "score": 1},
                                      {"text": "b", "score": 0.5}]},
    ],
)  # fmt: skip
def test_rankings_become_pairs_or_lists(tmp_path, row):
    batch, _ = read(tmp_path, [row])
    assert order(batch) == ["a", "b", "a", "c", "b", "c"]
    np.testing.assert_allclose(batch.weights[:3], 1 / 3)
    assert batch.rows.tolist()[:4] == [0, 0, 0, -1]
    assert order(read(tmp_path, [row], ranking="best_worst")[0]) == ["a", "c"]
    batch, _ = read(tmp_path, [row], preferences.rankings, most_ranked=4)
    assert order(batch) == ["a", "b", "c"]
    assert batch.tokens.inputs.shape[:2] == (16, 4)
    assert batch.present[:2].tolist() == [[True, True, True, False], [False] * 4]
    pair, _ = read(tmp_path, [PAIR], preferences.rankings, most_ranked=4)
    assert order(pair) == ["a", "b"]


def test_ties_in_rankings(tmp_path):
    tied = RANKED | {"scores": [1, 2, 2]}
    batch, report = read(tmp_path, [tied])
    assert order(batch) == ["a", "c", "b", "c"]
    assert report.dropped == {"tie": 1}
    assert batch.weights.tolist()[:2] == [0.5, 0.5]
    assert batch.margins.tolist()[:2] == [1.0, 1.0]
    assert fate(tmp_path, tied, kind=preferences.rankings) == "1 tie"
    assert fate(tmp_path, RANKED, kind=preferences.rankings, most_ranked=2) == "1 too_many"


def test_a_ranking_without_scores_is_refused(tmp_path):
    row = {"prompt": "q", "completions": ["a", "b"]}
    with pytest.raises(ValueError, match=r"a\.jsonl:1: column completions: which is better"):
        read(tmp_path, [row])
    with pytest.raises(ValueError, match=r"column scores: expected 2, one a completion"):
        read(tmp_path, [row | {"scores": [1]}])


# Single completions ----------------------------------------------------------------------------


def test_single_completions_have_labels(tmp_path):
    rows = [
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": talk("2+2?"), "completion": said("4"), "label": False},
        {"prompt": "r", "completion": "", "label": True},
        {"prompt": "s", "completion": "b", "label": 0},
    ]
    batch, report = read(tmp_path, rows, preferences.unpaired)
    assert report.dropped == {"empty_target": 1}
    assert texts(batch.tokens) == [("<|bos|>q", "a" + END), CHAT[0], ("<|bos|>s", "b" + END)]
    assert batch.labels.tolist()[:4] == [True, False, False, False]
    assert batch.rows.tolist()[:4] == [0, 1, 3, -1]
    with pytest.raises(ValueError, match=r"a\.jsonl:1: column label: expected true or false"):
        read(tmp_path, [rows[0] | {"label": "good"}], preferences.unpaired)


def test_pairs_come_apart_and_are_mismatched_with_other_prompts(tmp_path):
    rows = [PAIR, {"prompt": "r", "chosen": "c", "rejected": "d"}]
    batch, report = read(tmp_path, rows, preferences.unpaired, batching=Batching(4, once=True))
    assert texts(batch.tokens) == [
        *(("<|bos|>q", x + END) for x in "ab"),
        *(("<|bos|>r", x + END) for x in "cd"),
    ]
    assert batch.labels.tolist() == [True, False, True, False]
    assert texts(batch.mismatched) == [
        *(("<|bos|>q", x + END) for x in "dd"),
        *(("<|bos|>r", x + END) for x in "bb"),
    ]
    assert len(set(report.digests)) == 4


# Steps -----------------------------------------------------------------------------------------

STEPS = {"prompt": "q", "completions": ["ab", "c"], "labels": [True, False]}


def step_ends(batch):
    return [
        [(BYTES.decode(inputs[: t + 1].tolist()), float(labels[t])) for t in np.flatnonzero(mask)]
        for inputs, mask, labels in zip(batch.inputs, batch.step_mask, batch.labels, strict=True)
        if mask.any()
    ]


def test_steps_are_judged_at_their_last_token(tmp_path):
    soft = {"prompt": talk("2+2?"), "completions": ["4"], "labels": [0.5]}
    batch, _ = read(tmp_path, [STEPS, soft], preferences.steps)
    expected = [("<|bos|>qab\n", 1.0), ("<|bos|>qab\nc\n", 0.0)]
    assert step_ends(batch) == [expected, [(HEAD + "4\n", 0.5)]]
    batch, _ = read(tmp_path, [STEPS], preferences.steps, step_separator="")
    assert step_ends(batch) == [[("<|bos|>qab", 1.0), ("<|bos|>qabc", 0.0)]]


def test_a_step_whose_label_is_not_known_is_read_and_not_judged(tmp_path):
    rows = [STEPS | {"labels": [None, 0.25]}, STEPS | {"labels": [None, None]}]
    batch, _ = read(tmp_path, rows, preferences.steps, batching=Batching(1, once=True))
    assert step_ends(batch) == [[("<|bos|>qab\nc\n", 0.25)]]
    cut = {"too_long": "keep_start", "max_length": 6}
    batch, _ = read(tmp_path, [STEPS | {"labels": [1, None]}], preferences.steps, **cut)
    assert step_ends(batch) == [[("<|bos|>qab\n", 1.0)]]
    with pytest.raises(ValueError, match="no_label"):
        read(tmp_path, rows[1:], preferences.steps)


@pytest.mark.parametrize(
    ("too_long", "length", "expected"),
    [
        ("drop", 7, [[("<|bos|>qab\n", 1.0), ("<|bos|>qab\nc\n", 0.0)]]),
        ("drop", 6, "1 too_long"),
        ("keep_end", 6, [[("<|bos|>ab\n", 1.0), ("<|bos|>ab\nc\n", 0.0)]]),
        ("keep_start", 6, [[("<|bos|>qab\n", 1.0)]]),
        ("keep_start", 4, "1 too_long"),
    ],
)
def test_long_answers_lose_the_labels_of_missing_steps(tmp_path, too_long, length, expected):
    settings = {"too_long": too_long, "max_length": length}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            read(tmp_path, [STEPS], preferences.steps, **settings)
    elif too_long == "keep_end":
        with pytest.raises(ValueError, match="1 too_long"):  # no token of the prompt would be left
            read(tmp_path, [STEPS], preferences.steps, **settings)
        rows = [STEPS | {"prompt": "pq"}]
        batch, _ = read(tmp_path, rows, preferences.steps, **{**settings, "max_length": 7})
        assert step_ends(batch) == [[("<|bos|>qab\n", 1.0), ("<|bos|>qab\nc\n", 0.0)]]
    else:
        assert step_ends(read(tmp_path, [STEPS], preferences.steps, **settings)[0]) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": [True]}, "column labels: expected 2, one a step, got 1"),
        ({"labels": [True, 2]}, "column labels: expected truth values, or numbers of 0 to 1"),
        ({"labels": [True, "x"]}, "column labels: expected a number, got text 'x'"),
        ({"labels": [True, math.nan]}, "column labels: expected a number"),
        ({"completions": ["a", 3]}, "column completions: expected text, got int 3"),
    ],
)
def test_malformed_steps(tmp_path, change, words):
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: {words}"):
        read(tmp_path, [STEPS | change], preferences.steps)


# Batches and positions -------------------------------------------------------------------------


def numbered(path, count):
    """Pairs of different lengths, some of which are dropped."""
    rows = [
        {"prompt": f"{n:02d}?", "chosen": "a" * (n % 5 + 1), "rejected": "b" * (n % 3) + "c"}
        for n in range(count)
    ]
    for number in range(3, count, 7):
        rows[number]["rejected"] = rows[number]["chosen"]
    return write(path, rows)


def same(one, other):
    for a, b in zip(one, other, strict=True):
        if isinstance(a, tuple):
            same(a, b)
        else:
            np.testing.assert_array_equal(a, b)


def test_a_pass_has_every_pair_once_in_a_new_order(tmp_path):
    config = PairConfig(numbered(tmp_path / "a.jsonl", 41), max_length=32)
    kept = [number for number in range(41) if number % 7 != 3]
    stream = preferences.pairs(config, BYTES, Batching(5, seed=1))
    assert stream.summary == (f"{tmp_path}/a.jsonl: 41 rows, type preference (plain)",)
    passes = [[row for batch, _ in itertools.islice(stream, 7) for row in batch.rows.tolist()]
              for _ in range(2)]  # fmt: skip
    assert sorted(passes[0]) == sorted(passes[1]) == kept
    assert passes[0] != passes[1]
    assert stream.dropped.counts["identical"] >= 12  # with those of a third pass, if it began
    stream = preferences.pairs(config, BYTES, Batching(8, once=True))
    found = list(stream)
    rows = [row for batch, _ in found for row in batch.rows.tolist()]
    assert rows == kept + [-1] * (40 - len(kept))
    assert sum(report.examples for _, report in found) == len(kept)
    assert found[-1][0].weights.sum() == len(kept) % 8
    assert found[-1][1].epoch == 1.0
    assert {len(batch.tokens.inputs) for batch, _ in found} == {8}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [preferences.pairs, preferences.unpaired])
def test_a_position_is_exact(tmp_path, workers, kind):
    """Also in the middle of a window, and of the two halves of a pair."""
    path = numbered(tmp_path / "a.jsonl", 41)
    kinds = {preferences.pairs: PairConfig, preferences.unpaired: PreferenceConfig}
    config = kinds[kind](path, max_length=32, workers=workers)
    stream = kind(config, BYTES, Batching(5))
    taken = []
    for _ in range(6):
        taken.append((json.loads(json.dumps(stream.get_state())), next(stream)))
    stream.close()
    for state, _ in taken[::-2]:
        again = kind(dataclasses.replace(config, workers=0), BYTES, Batching(5))
        again.set_state(state)
        for _, (batch, report) in taken[[s for s, _ in taken].index(state) :]:
            other, told = next(again)
            same(batch, other)
            assert told.digests == report.digests
        again.close()


def test_a_position_over_other_data_or_settings_is_refused(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 20)
    state = preferences.pairs(PairConfig(path), BYTES, Batching(2)).get_state()
    other = preferences.pairs(PairConfig(path, max_length=8), BYTES, Batching(2))
    with pytest.raises(ValueError, match="max_length was 1024 and is 8"):
        other.set_state(state)
    numbered(tmp_path / "a.jsonl", 21)
    with pytest.raises(ValueError, match=r"data 0 \(a\.jsonl\) was"):
        preferences.pairs(PairConfig(path), BYTES, Batching(2)).set_state(state)


def test_processes_divide_the_data(tmp_path):
    config = PairConfig(numbered(tmp_path / "a.jsonl", 40), max_length=32)
    shares = [Batching(3, process_index=index, process_count=2) for index in range(2)]
    seen = []
    for share in shares:
        stream = preferences.pairs(config, BYTES, share)
        found = [batch for batch, _ in itertools.islice(stream, 5)]
        assert {batch.tokens.inputs.shape for batch in found} == {(3, 2, 32)}
        seen.append({row for batch in found for row in batch.rows.tolist()})
    assert not seen[0] & seen[1]
    parts = [list(preferences.pairs(config, BYTES, share._replace(once=True))) for share in shares]
    assert len(parts[0]) == len(parts[1]) == 6
    rows = [batch.rows.tolist() for part in parts for batch, _ in part]
    assert sorted(x for row in rows for x in row if x >= 0) == [n for n in range(40) if n % 7 != 3]


def test_held_out_files_are_read_in_their_order(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 20)
    config = PairConfig("none", eval=path)
    found = list(preferences.pairs(config, BYTES, Batching(4, part="eval", limit=10)))
    assert [row for batch, _ in found for row in batch.rows.tolist()][:9] == [
        *(0, 1, 2, 4, 5, 6, 7, 8, 9)
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"data\.eval is not set"):
        preferences.pairs(PairConfig(path), BYTES, Batching(4, part="eval"))


def test_digests_are_of_the_tokens_and_not_of_the_batch(tmp_path):
    rows = [PAIR, {"prompt": "q", "chosen": "b", "rejected": "a"}, PAIR | {"margin": 2}]
    first, second, third = read(tmp_path, rows)[1].digests[:3]
    assert first == third != second
    assert read(tmp_path, [PAIR])[1].digests == (first, *[""] * 15)
    moved = {"prompt": "qa", "chosen": "a", "rejected": "b"}
    split = {"prompt": "q", "chosen": "aa", "rejected": "ab"}
    digests = read(tmp_path, [moved, split])[1].digests
    assert digests[0] != digests[1]
    assert first == "aca48e0d0d4f37990f6d316a714ef943"  # of caches that are on disk


def test_microbatches_do_not_separate_pairs_and_share_prompts(tmp_path):
    """As a recipe reads them: pairs in the order of the layout, each prompt read once."""
    rows = [{"prompt": "q" * 20 + str(n), "chosen": "a" * 9, "rejected": "b" * (n + 1)}
            for n in range(4)]  # fmt: skip
    batch, _ = read(tmp_path, rows, batching=Batching(4, once=True))
    flat, parts = batches.flat(batch.tokens), 2
    plain = compact.Plain(flat.inputs, flat.segment_ids, flat.positions)
    _, layout = compact.lay_out(plain, flat.completion_mask, parts, width=64)
    pairs = np.arange(4).reshape(parts, -1).T.ravel()
    ordered = batches.TokenBatch(*(field[pairs] for field in batch.tokens))
    split = train_step.split(ordered, parts)
    assert (layout.segment_ids > 0).sum() < (flat.segment_ids > 0).sum() - 4 * 20
    for part in range(parts):
        tokens = batches.flat(batches.TokenBatch(*(field[part] for field in split)))
        mask = np.asarray(tokens.completion_mask)
        read_there = layout.inputs[part].ravel()[layout.places[part]]
        np.testing.assert_array_equal(read_there[mask], np.asarray(tokens.inputs)[mask])


def test_rows_of_the_recipes_are_told_apart(tmp_path):
    path = write(tmp_path / "a.jsonl", [STEPS])
    with pytest.raises(ValueError, match="stepwise rows, which the recipe of a process reward"):
        preferences.check(PairConfig(path), preferences.PAIRS)
    with pytest.raises(ValueError, match="preference rows, which a preference recipe"):
        sources.check(write(tmp_path / "b.jsonl", [PAIR]), sources.DataConfig("x"))
    with pytest.raises(ValueError, match=r"data\.max_length is 0"):
        PairConfig(path, max_length=0)


def test_canonical_pairs_keep_other_columns(tmp_path):
    path = write(tmp_path / "a.jsonl", [PAIR | {"id": 7}])
    (row,) = sources.rows(path, PairConfig(path).files(), preferences.PAIRS)
    assert row == ComparedRow("q", ["a", "b"], meta={"id": 7}, where=f"{path}:1")
    assert not isinstance(row, Dropped)
