"""`jaxpost eval MODEL DATA [key=value ...]`: how well a model does on held-out rows."""

import collections
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

from rich import console, table

from jaxpost import config as configs
from jaxpost.batch import TokenBatch
from jaxpost.commands import arguments, compile_cache, models
from jaxpost.data import chat, sources
from jaxpost.recipes import evaluation

DESCRIPTION = """Measures a model on a data file: loss (nats a target), perplexity and token
accuracy, and with --generate the share of rows that it answers exactly as the data does.

MODEL is a Hugging Face folder or hub id, or a run's folder. DATA is a file, folder or glob of any
row type that training reads. key=value pairs set keys of `data` and `chat` as in a configuration,
data.max_length=512 for instance; of a run they start from its own."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How rows are read."""

    data: sources.DataConfig
    chat: chat.ChatOptions


def main(argv: Sequence[str]) -> int:
    """Prints the measures as a table, or as JSON."""
    parser = arguments.Parser("eval", DESCRIPTION)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    arguments.add_model_options(parser)
    parser.add_argument("--batch-size", type=int, default=8, help="rows at once (default: 8)")
    parser.add_argument("--rows", type=int, help="only the first so many rows")
    parser.add_argument("--generate", type=int, default=0, help="rows to answer greedily")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer (default: 128)")
    parser.add_argument("--samples", help="write prompts, answers and verdicts to this JSONL file")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_intermixed_args(argv)
    compile_cache.use_compile_cache()
    opened = models.open_model(
        options.model, step=options.step, dtype=options.dtype, adapter=options.adapter
    )
    settings = read_settings(opened, options.data, options.overrides)
    rows = sources.eval_stream(
        settings.data,
        chat.Tokenize(opened.tokenizer, settings.chat),
        length=settings.data.max_length,
        batch_size=options.batch_size,
        rows=options.rows,
    )
    for line in rows.summary:
        print(line, file=sys.stderr)
    dropped: collections.Counter[str] = collections.Counter()
    measure = evaluation.make_measure(opened.model)
    metrics = evaluation.evaluate(measure, opened.params, counted(rows, dropped))
    for reason, count in dropped.items():
        print(f"dropped {count} rows: {reason}", file=sys.stderr)
    if options.generate:
        matches, records = evaluation.exact_match(
            opened.model,
            opened.params,
            opened.tokenizer,
            sources.eval_rows(settings.data, options.generate),
            settings.chat,
            max_new_tokens=options.max_tokens,
            batch_size=options.batch_size,
        )
        metrics |= matches
        write(options.samples, records)
    print_metrics(metrics, options.json)
    return 0


def read_settings(opened: models.Opened, data: str, overrides: Sequence[str]) -> Settings:
    """The run's own settings, or the defaults, on this data, under the overrides."""
    if opened.config is None:
        settings = Settings(sources.DataConfig(train=data), chat.ChatOptions())
    else:
        settings = Settings(opened.config.data, opened.config.chat)
    here = dataclasses.replace(settings.data, train=data, eval=data)
    return configs.override(Settings(here, settings.chat), overrides)


def counted(rows: sources.DataStream, dropped: collections.Counter[str]) -> Iterator[TokenBatch]:
    """The batches alone; what was dropped is counted on the way."""
    for batch, report in rows:
        dropped.update(report.dropped)
        yield batch


def write(path: str | None, records: Sequence[Mapping]) -> None:
    """The answers, one a line."""
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def print_metrics(metrics: dict[str, float], as_json: bool) -> None:
    """The measures, one a row."""
    if as_json:
        print(json.dumps(metrics))
        return
    shown = table.Table("measure", "value")
    shown.columns[1].justify = "right"
    for name, value in metrics.items():
        share = name.endswith(("accuracy", "match"))
        shown.add_row(name.removeprefix("eval/"), f"{value:.2%}" if share else f"{value:.4f}")
    console.Console().print(shown)
