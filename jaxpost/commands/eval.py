"""`jaxpost eval MODEL DATA [key=value ...]`: how well a model does on held-out rows."""

import argparse
import collections
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich import console, table

from jaxpost import config as configs
from jaxpost.batch import TokenBatch
from jaxpost.commands import by_labels, by_reward, compile_cache, inputs, models, usage
from jaxpost.data import chat, sources
from jaxpost.recipes import evaluation

BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    """How rows are read."""

    data: sources.DataConfig
    chat: chat.ChatOptions


def main(argv: Sequence[str]) -> int:
    """Prints the measures as a table, or as JSON."""
    options = usage.eval().parse_intermixed_args(argv)
    if Path(options.model).is_file() and is_model(options.data):
        raise configs.ConfigError(
            f"MODEL comes before DATA: jaxpost eval {options.data} {options.model}"
        )
    inputs.check_data(options.data, "DATA")
    compile_cache.use_compile_cache()
    kind = by_labels.kind_of(options.model)
    if kind is not None and by_labels.is_asked(kind, options):
        metrics, records = by_labels.measure(kind, options)
    else:
        opened = models.open_model(
            options.model, step=options.step, dtype=options.dtype, adapter=options.adapter
        )
        measure = by_reward.measure if by_reward.is_asked(opened, options) else by_likelihood
        metrics, records = measure(opened, options)
    write(options.samples, records)
    print_metrics(metrics, options.json)
    return 0


def by_likelihood(
    opened: models.Opened, options: argparse.Namespace
) -> tuple[dict[str, float], Sequence[Mapping]]:
    """Loss, perplexity, token accuracy; with --generate exact match, and a record an answer."""
    refuse_unused(options)
    settings = read_settings(opened, options.data, options.overrides)
    inputs.check_length(settings.data.max_length, opened.model.config)
    tokenize = chat.Tokenize(opened.tokenizer, settings.chat, opened.model.config.vocab_size)
    rows = sources.eval_stream(
        settings.data,
        tokenize,
        length=settings.data.max_length,
        batch_size=options.batch_size or BATCH_SIZE,
        rows=options.rows,
    )
    for line in rows.summary:
        print(line, file=sys.stderr)
    dropped: collections.Counter[str] = collections.Counter()
    measure = evaluation.make_measure(opened.model)
    metrics = evaluation.evaluate(measure, opened.params, counted(rows, dropped))
    for reason, count in dropped.items():
        print(f"dropped {count} rows: {reason}", file=sys.stderr)
    if not options.generate:
        return metrics, ()
    logging.getLogger(sources.__name__).setLevel(logging.INFO)  # which rows are not asked
    matches, records = evaluation.exact_match(
        opened.model,
        opened.params,
        opened.tokenizer,
        sources.eval_rows(settings.data, tokenize, options.generate),
        settings.chat,
        max_new_tokens=options.max_tokens or by_reward.MAX_TOKENS,
        batch_size=options.batch_size or BATCH_SIZE,
    )
    return metrics | matches, records


def refuse_unused(options: argparse.Namespace) -> None:
    """Refuses options that would do nothing. Raises ConfigError."""
    needed = {"completions": "--reward", "temperature": "--reward"}
    if not options.generate:
        needed |= {"max_tokens": "--generate or --reward", "samples": "--generate or --reward"}
    for name, needs in needed.items():
        if vars(options)[name] is not None:
            raise configs.ConfigError(f"--{name.replace('_', '-')} needs {needs}")


def is_model(path: str) -> bool:
    """Whether a path is a model's folder or a run's."""
    return (Path(path) / "config.json").is_file() or models.is_run(path)


def read_settings(opened: models.Opened, data: str, overrides: Sequence[str]) -> Settings:
    """The run's own settings, or the defaults, on this data, under the overrides."""
    if models.reads_rows(opened.config):
        own = opened.config.data
    else:
        length = min(sources.DataConfig.max_length, opened.model.config.max_positions)
        own = sources.DataConfig(train=data, max_length=length)
    here = dataclasses.replace(own, train=data, eval=data)
    return configs.override(Settings(here, opened.chat), overrides)


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
        if "missing" in name or name.endswith("/places"):
            shown.add_row(name.removeprefix("eval/"), f"{value:.0f}")
            continue
        share = name.endswith(("accuracy", "match", "ratio", "majority", "/f1")) or "pass@" in name
        shown.add_row(name.removeprefix("eval/"), f"{value:.2%}" if share else f"{value:.4f}")
    console.Console().print(shown)
