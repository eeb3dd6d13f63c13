"""The keys of a configuration that say where preferences are, and how they are read."""

import dataclasses
from typing import Any, Literal

from jaxpost.data import questions, sources
from jaxpost.data.preference_tokens import TooLong
from jaxpost.data.sources import Paths
from jaxpost.options import check_ranges, option


@dataclasses.dataclass(frozen=True)
class Files:
    """Which files."""

    train: Paths = option(
        help="files, folders or patterns to train on: one, a list, or a mixture {path: weight}"
    )
    eval: Paths | None = option(None, "held-out files, as `train`; null: none")


@dataclasses.dataclass(frozen=True)
class ReadingConfig:
    """How files of rows that judge completions are read."""

    format: str = option("auto", "type of the rows: auto, or the name of one")
    columns: dict[str, str] | None = option(
        None, "columns under other names, {prompt: question, chosen: best}; a.b is a key"
    )
    as_chat: bool | None = option(
        None, "make plain prompts and completions turns; null: for questions and steps only"
    )
    max_length: int = option(1024, "room of a prompt and a completion", "targets", least=1)
    too_long: TooLong = option(
        "drop",
        "where a completion has no room: drop the row, keep_end (cut the beginnings of the "
        "prompts, alike), keep_start (cut the ends of all completions; dropped where some have "
        "room) or error",
    )
    malformed: Literal["error", "drop"] = option("error", "rows that cannot be read: error or drop")
    shuffle: bool = option(True, "a new random order each pass over the data")
    seed: int | None = option(None, "of the order; null: the run's", least=0)
    workers: int = option(
        0, "processes that prepare data; 0: a thread of this one", "processes", least=0
    )
    template_kwargs: dict[str, Any] | None = option(
        None, "further arguments of the chat template, such as {enable_thinking: false}"
    )

    def __post_init__(self):
        check_ranges(self, "data.")
        if not self.shuffle and self.seed is not None:
            raise ValueError("data.seed is for shuffling, and data.shuffle is false; leave it out")


@dataclasses.dataclass(frozen=True)
class PreferenceConfig(ReadingConfig, Files):
    """Files of rows that judge completions."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("train", "eval"):
            sources.check_paths(name, getattr(self, name))

    def files(self) -> sources.DataConfig:
        """The same as far as reading rows goes."""
        return sources.DataConfig(
            train=self.train,
            eval=self.eval,
            format=self.format,
            columns=self.columns,
            as_chat=self.as_chat,
            max_length=self.max_length,
            malformed=self.malformed,
            shuffle=self.shuffle,
            seed=self.seed,
            workers=self.workers,
        )


@dataclasses.dataclass(frozen=True)
class PairConfig(PreferenceConfig):
    """Files of pairs, and of rankings that pairs are made of."""

    ranking: Literal["all", "best_worst"] = option(
        "all", "pairs of a ranking: all (together they count as one), or the best and the worst"
    )
    score_margins: bool = option(True, "a pair without a margin has the difference of its scores")
    mask_shared: bool = option(
        False, "words that both completions begin with count as prompt, and are not trained"
    )


@dataclasses.dataclass(frozen=True)
class RankingConfig(PreferenceConfig):
    """Files of rankings, read as lists."""

    most_ranked: int = option(8, "completions of a list; longer ones are dropped", least=2)


@dataclasses.dataclass(frozen=True)
class StepConfig(PreferenceConfig):
    """Files of answers whose steps are judged."""

    step_separator: str = option("\n", "text that ends each step, and is judged with it")


@dataclasses.dataclass(frozen=True)
class QuestionConfig(PreferenceConfig):
    """Files of completions that are right or wrong, which a verifier is asked about."""

    as_chat: bool | None = option(
        None, "ask as a user's turn; null: where the tokenizer has a chat template"
    )
    too_long: Literal["drop", "error"] = option(
        "drop", "a question that has no room: drop or error"
    )
    question: str = option(
        questions.QUESTION, "what is asked, with {prompt} and {completion} in their places"
    )
    answers: tuple[str, ...] = option(
        questions.ANSWERS, "for right and wrong; of each the first token is read"
    )

    def __post_init__(self):
        super().__post_init__()
        self.asked()

    def asked(self) -> questions.Question:
        """The question. Raises ValueError for one that cannot be asked."""
        return questions.Question(self.question, self.answers, self.as_chat, self.template_kwargs)

    def files(self) -> sources.DataConfig:
        return dataclasses.replace(super().files(), as_chat=None)
