"""The guard model: a tiny trained hybrid model whose task cannot be done with a part of its memory missing.

It is an Inkling of three layers (full attention, full attention, a window of 32 tokens, four short convolutions each),
trained on the task of :mod:`kvcore_transformers.guard.task` by ``scripts/train_guard.py``. Its answers are exact, so
whatever a cache loses on a request's way shows as a number: the share of answers that are right.
"""
