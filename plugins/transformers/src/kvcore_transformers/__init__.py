"""Hugging Face models on kvcore (this module stays light: no torch, no transformers at import)."""

from kvcore.contract import PluginInfo

PLUGIN = PluginInfo(name="transformers", contract=(1, 0), summary="Hugging Face models, kvcore run")
