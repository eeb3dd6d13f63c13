"""Files of preferences to batches: pairs, ranked lists, single judged completions, judged steps.

    stream = pairs(config, tokenizer, Batching(batch_size=8, seed=0))
    batch, report = next(stream)              # PreferenceBatch [8, 2, T], PreferenceReport
    stream.set_state(stream.get_state())      # exact, also in another process
    held_out = pairs(config, tokenizer, Batching(batch_size=8, part="eval"))  # each pair once

`rankings`, `unpaired`, `steps` and `questions` do the same for their batches. A batch is as long as
its longest sequence needs, in eighths of `max_length`; `compact.lay_out` packs it, and reads
prompts once.
"""

import dataclasses
from collections.abc import Sequence

from jaxpost.batch import PreferenceBatch, StepBatch, UnpairedBatch
from jaxpost.data import preference_rows as kinds
from jaxpost.data import sources
from jaxpost.data.kinds import Kind
from jaxpost.data.preference_batches import Compared, Single, Stepwise
from jaxpost.data.preference_config import (
    PairConfig,
    PreferenceConfig,
    QuestionConfig,
    RankingConfig,
    StepConfig,
)
from jaxpost.data.preference_stream import Batching, PreferenceReport, PreferenceStream, open_stream
from jaxpost.data.preference_tokens import Judge
from jaxpost.data.question_tokens import Asked
from jaxpost.data.tokenizers import Tokenizer

__all__ = [
    "Batching",
    "PairConfig",
    "PreferenceConfig",
    "PreferenceReport",
    "PreferenceStream",
    "QuestionConfig",
    "RankingConfig",
    "StepConfig",
    "check",
    "pairs",
    "questions",
    "rankings",
    "steps",
    "unpaired",
]

PAIRS = (*kinds.PAIRS, *kinds.RANKINGS)
RANKINGS = (*kinds.RANKINGS, *kinds.PAIRS)
UNPAIRED = (*kinds.UNPAIRED, *kinds.PAIRS)
STEPWISE = kinds.STEPWISE


def pairs(
    config: PairConfig, tokenizer: Tokenizer, batching: Batching
) -> PreferenceStream[PreferenceBatch]:
    """`PreferenceBatch` [B, 2, T]: the chosen completion, then the rejected one."""
    judge = dataclasses.replace(
        judge_of(config, tokenizer, batching),
        ranking=config.ranking,
        score_margins=config.score_margins,
        mask_shared=config.mask_shared,
    )
    return open_stream(config, judge, Compared(2, batching.read_end), batching, PAIRS)


def rankings(
    config: RankingConfig, tokenizer: Tokenizer, batching: Batching
) -> PreferenceStream[PreferenceBatch]:
    """`PreferenceBatch` [B, K, T] of lists, K = `most_ranked`; pairs are lists of two."""
    judge = dataclasses.replace(
        judge_of(config, tokenizer, batching), ranking="list", most=config.most_ranked
    )
    make = Compared(config.most_ranked, batching.read_end)
    return open_stream(config, judge, make, batching, RANKINGS)


def unpaired(
    config: PreferenceConfig, tokenizer: Tokenizer, batching: Batching
) -> PreferenceStream[UnpairedBatch]:
    """`UnpairedBatch` [B, T]; a pair is two completions, of which the chosen is desirable."""
    judge = dataclasses.replace(judge_of(config, tokenizer, batching), single=True)
    return open_stream(config, judge, Single(batching.read_end), batching, UNPAIRED)


def steps(
    config: StepConfig, tokenizer: Tokenizer, batching: Batching
) -> PreferenceStream[StepBatch]:
    """`StepBatch` [B, T]; an answer is read to its last token, which ends its last step."""
    judge = dataclasses.replace(
        judge_of(config, tokenizer, batching),
        limit=config.max_length,
        separator=config.step_separator,
    )
    return open_stream(config, judge, Stepwise(), batching, STEPWISE)


def questions(
    config: QuestionConfig, tokenizer: Tokenizer, batching: Batching
) -> PreferenceStream[StepBatch]:
    """`StepBatch` [B, T]; a question about each completion, with one step, which ends it."""
    judge = Asked(
        tokenizer,
        config.max_length,
        config.too_long,
        config.malformed,
        vocab_size=batching.vocab_size,
        single=True,
        question=config.asked(),
    )
    return open_stream(config, judge, Stepwise(), batching, UNPAIRED)


def judge_of(config: PreferenceConfig, tokenizer: Tokenizer, batching: Batching) -> Judge:
    """What all kinds of comparison have in common."""
    return Judge(
        tokenizer,
        config.max_length + 1 - batching.read_end,
        config.too_long,
        config.malformed,
        vocab_size=batching.vocab_size,
        template_kwargs=config.template_kwargs,
    )


def check(config: PreferenceConfig, accept: Sequence[Kind]) -> None:
    """Opens the files of `train` and `eval`, and reads the rows of those that are not too long.

    `accept`: `PAIRS`, `RANKINGS`, `UNPAIRED` or `STEPWISE`.

    Raises:
      FileNotFoundError, ValueError: as the streams and their rows do.
    """
    for part in (config.train, config.eval):
        if part is not None:
            sources.check(part, config.files(), accept)
