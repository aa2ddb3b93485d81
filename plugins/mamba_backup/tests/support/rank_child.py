"""One rank of an engine with states: ``python rank_child.py``. Which model is an option of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid import MODELS, SETTINGS, Work, prompt  # beside this file

from kvcore.engine.step import Step
from kvcore.spec import ModelSpec
from kvcore.testing.ranks.child import Answer, Rank, main


class HybridRank(Rank):
    plugins = ("mamba_backup",)
    settings = SETTINGS

    def __init__(self, setup: Mapping[str, Any]) -> None:
        super().__init__(setup)
        self.work = Work(self.cache)

    def model(self) -> ModelSpec:
        return MODELS[self.options["kind"]]

    def compute(self, step: Step, request: str, tag: int, start: int, stop: int) -> None:
        tokens = prompt(tag, stop)
        self.work.tokens[request] = tokens[:start]
        self.work.compute(step, [(request, tokens[start:])])

    def check(self, request: str, tag: int, tokens: int) -> Answer:
        self.work.tokens[request] = prompt(tag, tokens)
        try:
            return {"compared": self.work.check(request)}
        except AssertionError as error:
            return {"wrong": str(error)}


if __name__ == "__main__":
    main(HybridRank)
