"""`jaxpost inspect CONFIG [key=value ...]`: a batch as the model sees it."""

import collections
import itertools
from collections.abc import Mapping, Sequence

from rich import console

from jaxpost.batch import TokenBatch
from jaxpost.commands import arguments, recipes
from jaxpost.data import inspect, tokenizers
from jaxpost.recipes import setup

DESCRIPTION = """Shows one batch of a configuration's data as the model will see it: every token,
coloured by whether it is trained, where sequences begin and end, weights, counts, and what was
dropped.

Weights are shown as the data gives them; an update divides them by their sum."""


def main(argv: Sequence[str]) -> int:
    """Shows one batch."""
    parser = arguments.Parser("inspect", DESCRIPTION)
    parser.add_argument("config", metavar="CONFIG", help="the configuration file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys set over it")
    parser.add_argument("--batch", type=int, default=0, help="which batch, from 0 (default: 0)")
    parser.add_argument("--row", type=int, help="only this row, and a table of all its places")
    parser.add_argument("--width", type=int, help="columns to write (default: the terminal's)")
    parser.add_argument("--plain", action="store_true", help="marks instead of colours")
    options = parser.parse_intermixed_args(argv)
    if options.batch < 0:
        parser.error(f"--batch {options.batch}: batches are counted from 0")
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
