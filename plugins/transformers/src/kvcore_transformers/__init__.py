"""Hugging Face models on kvcore (this module stays light: no torch, no transformers at import)."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.contract import Command, ModelAdapter, PluginInfo, hookimpl

PLUGIN = PluginInfo(
    name="transformers", contract=(1, 0), summary="Hugging Face models, kvcore run, kvcore plan, kvcore accuracy"
)


@hookimpl
def kvcore_register_models() -> Sequence[type[ModelAdapter]]:
    """Decoder-only models: Llama and SmolLM, Qwen, Mistral, Gemma 3, DeepSeek-V3, Inkling, Qwen3-Next."""
    from kvcore_transformers.models.adapters import ADAPTERS
    from kvcore_transformers.models.hybrids import HYBRIDS

    return (*ADAPTERS, *HYBRIDS)


@hookimpl
def kvcore_register_commands() -> Sequence[Command]:
    """kvcore run, kvcore plan, kvcore accuracy."""
    from kvcore_transformers.commands import accuracy, plan, run

    return (*run.COMMANDS, *plan.COMMANDS, *accuracy.COMMANDS)
