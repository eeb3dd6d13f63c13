"""`jaxpost inspect CONFIG [key=value ...]`: a batch as the model sees it."""

import itertools
from collections.abc import Sequence

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
    *_, (batch, report) = itertools.islice(data, options.batch + 1)
    data.close()
    out.print(f"\nbatch {options.batch}, to epoch {report.epoch:.4g}")
    show(out, batch, tokenizer, options.row, plain)
    out.print(inspect.show_totals(batch), end="", markup=False)
    out.print(f"dropped so far: {data.dropped}", markup=False, soft_wrap=True)
    spelt = f"special tokens spelt in texts so far: {data.spelt}"
    out.print(spelt, markup=False, soft_wrap=True)
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
