"""`jaxpost inspect CONFIG [key=value ...]`: a batch as the model sees it."""

import collections
import itertools
from collections.abc import Mapping, Sequence

from rich import console

from jaxpost.batch import TokenBatch
from jaxpost.commands import recipes, usage
from jaxpost.data import inspect, tokenizers
from jaxpost.recipes import setup


def main(argv: Sequence[str]) -> int:
    """Shows one batch."""
    options = usage.inspect().parse_intermixed_args(argv)
    recipe, config = recipes.load(options.config, options.overrides)
    out = console.Console(width=options.width, highlight=False)
    plain = options.plain or not out.is_terminal or out.no_color
    tokenizer = setup.load_tokenizer(config.model)
    data = recipe.make_data(config, tokenizer)
    for line in data.summary:
        out.print(line, markup=False, soft_wrap=True)
    seen = list(itertools.islice(data, options.batch + 1))
    batch, report = seen[-1]
    dropped, places = collections.Counter(), {}
    for _, earlier in seen:
        dropped.update(earlier.dropped)
        places = {**earlier.places, **places}
    data.close()
    out.print(f"\nbatch {options.batch}, to epoch {report.epoch:.4g}")
    show(out, batch, tokenizer, options.row, plain)
    out.print(inspect.show_totals(batch), end="", markup=False)
    out.print(f"dropped so far: {said(dropped, places)}", markup=False, soft_wrap=True)
    return 0


def show(
    out: console.Console,
    batch: TokenBatch,
    tokenizer: tokenizers.Tokenizer,
    row: int | None,
    plain: bool,
) -> None:
    """All rows of a batch, or one with its table of places."""
    rows = len(batch.inputs)
    if row is not None and not 0 <= row < rows:
        raise ValueError(f"--row {row}: the batch has rows 0 to {rows - 1}")
    if not plain:
        out.print(inspect.legend())
    for number in range(rows) if row is None else [row]:
        out.print(inspect.show_row(batch, number, tokenizer.decode, plain=plain))
    if row is not None:
        table = inspect.positions_table(batch, row, tokenizer.decode)
        out.print(table, markup=False, soft_wrap=True)


def said(dropped: Mapping[str, int], places: Mapping[str, Sequence[str]]) -> str:
    """Dropped rows by reason, with where the first of each stand."""
    parts = (f"{count} {reason} ({', '.join(places[reason])})" for reason, count in dropped.items())
    return ", ".join(parts) or "none"
