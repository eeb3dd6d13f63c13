"""`jaxpost inspect CONFIG [key=value ...]`: a batch as the model sees it."""

import argparse
import itertools
from collections.abc import Sequence

from rich import console

from jaxpost.batch import TokenBatch
from jaxpost.commands import inputs, recipes, usage
from jaxpost.data import inspect, tokenizers
from jaxpost.recipes import setup


def main(argv: Sequence[str]) -> int:
    """Shows one batch."""
    options = usage.inspect().parse_intermixed_args(argv)
    recipe, config = recipes.load(options.config, options.overrides)
    inputs.check(config)
    out = console.Console(width=options.width, highlight=False)
    plain = options.plain or not out.is_terminal or out.no_color
    tokenizer = setup.load_tokenizer(config.model)
    data = recipe.make_data(config, tokenizer)
    for line in data.summary:
        out.print(line, markup=False, soft_wrap=True)
    *_, (batch, report) = itertools.islice(data, options.batch + 1)
    data.close()
    out.print(f"\nbatch {options.batch}, to epoch {report.epoch:.4g}")
    out.print(inspect.show_totals(batch), end="", markup=False)
    for line in (
        f"dropped so far: {data.dropped}",
        *data.dropped.explained(),
        f"special tokens spelt in texts so far: {data.spelt}\n",
    ):
        out.print(line, markup=False, soft_wrap=True)
    show(out, batch, tokenizer, options, plain)
    return 0


def show(
    out: console.Console,
    batch: TokenBatch,
    tokenizer: tokenizers.Tokenizer,
    options: argparse.Namespace,
    plain: bool,
) -> None:
    """The first rows of a batch, or one with its table of places."""
    rows, row = len(batch.inputs), options.row
    if row is not None and not 0 <= row < rows:
        raise ValueError(f"--row {row}: the batch has rows 0 to {rows - 1}")
    if not plain:
        out.print(inspect.legend())
    shown = range(min(options.rows, rows)) if row is None else [row]
    for number in shown:
        out.print(inspect.show_row(batch, number, tokenizer.decode, plain=plain))
    if row is None and len(shown) < rows:
        out.print(f"{rows - len(shown)} more rows: --rows {rows}", markup=False)
    if row is not None:
        table = inspect.positions_table(batch, row, tokenizer.decode)
        out.print(table, markup=False, soft_wrap=True)
