"""The KV-cache layer of an LLM inference engine. Importing this package loads no torch."""

__version__ = "0.1.0"
