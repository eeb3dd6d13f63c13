"""From rows that judge completions to questions about each: `Judged`, or why there are none."""

import dataclasses

import numpy as np

from jaxpost.batch import Example
from jaxpost.data import preference_tokens, questions
from jaxpost.data.preference_tokens import Judged
from jaxpost.data.questions import Question
from jaxpost.data.rows import ComparedRow, Dropped, Ids, LabelledRow, Note, Words


@dataclasses.dataclass(frozen=True)
class Asked(preference_tokens.Judge):
    """A question a completion; the mask is on its last token, after which the answer comes.

    Of a pair the chosen completion is right and the other one wrong (`single`).
    """

    question: Question = questions.DEFAULT

    def judged(self, row: ComparedRow | LabelledRow, number: int, told: list[Note]):
        """The tokens of a row's questions.

        Raises:
          ValueError: it has no prompt, or is tokenised; or it is too long, where that is an error.
        """
        compared = isinstance(row, ComparedRow)
        sides = row.completions if compared else [row.completion]
        begun = (row.begun or "") if compared else ""
        examples = [self.asked(row.prompt, side, begun) for side in sides]
        longest = max(len(example.tokens) for example in examples)
        if longest > self.limit and self.too_long == "error":
            raise ValueError(
                f"{row.where}: a question of {longest} tokens, where there is room for "
                f"{self.limit}; raise max_length, or set too_long to drop"
            )
        if longest > self.limit:
            return Dropped("too_long", row.where)
        if preference_tokens.repeated(examples):
            return Dropped("identical", row.where)
        if self.vocab_size is not None and max(e.tokens.max() for e in examples) >= self.vocab_size:
            return Dropped("outside_vocabulary", row.where)
        values = (0.0,) if compared else (float(row.label),)
        return Judged(tuple(examples), 0, values, number, row.where)

    def asked(self, prompt: Words | None, side: Words, begun: str) -> Example:
        """The question about one completion."""
        if prompt is None:
            raise ValueError("a verifier is asked about a prompt, and the row has none of its own")
        if isinstance(prompt, Ids) or isinstance(side, Ids):
            raise ValueError("a verifier is asked in words, and the row has token ids")
        said = begun + side if isinstance(side, str) else side
        tokens = np.array(self.question.tokens(self.tokenizer, prompt, said), np.int32)
        mask = np.arange(len(tokens)) == len(tokens) - 1
        return Example(tokens, mask, mask.astype(np.float32))
