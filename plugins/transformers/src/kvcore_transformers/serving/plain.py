"""Plain transformers behind the engine's interface: the run that kvcore's text is compared with."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import transformers

from kvcore.errors import KVCoreError, RequestError
from kvcore_transformers.serving.requests import DoneEvent, EngineStats, Event, FailedEvent, GenerationRequest


class PlainEngine:
    """Serves requests one after the other with ``model.generate``: dynamic cache, greedy, no kvcore.

    Args:
        model: a Hugging Face causal language model, with its own attention implementation.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        # The model's own defaults may sample or penalise; the comparison is greedy decoding and nothing else.
        model.generation_config = transformers.GenerationConfig()
        self._queue: deque[GenerationRequest] = deque()
        self._events: list[Event] = []
        self.stats = EngineStats()

    @property
    def busy(self) -> bool:
        """Whether any request is in work."""
        return bool(self._queue)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        if not request.prompt:
            raise RequestError("a prompt needs at least one token", request=request.id)
        self._queue.append(request)

    def abort(self, request_id: str, reason: str = "aborted by the caller") -> None:
        """Take a request that has not begun out of the queue."""
        for request in list(self._queue):
            if request.id == request_id:
                self._queue.remove(request)
                self._events.append(FailedEvent(request_id, RequestError(reason, request=request_id).as_dict()))

    def events(self) -> list[Event]:
        """Take what happened since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def step(self) -> bool:
        """Serve one request to its end."""
        if not self._queue:
            return False
        request = self._queue.popleft()
        try:
            self._events.append(DoneEvent(request.id, self.generate(request)))
        except KVCoreError as error:
            self._events.append(FailedEvent(request.id, error.as_dict()))
        return True

    @torch.inference_mode()
    def generate(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the generated tokens of one request."""
        prompt = torch.tensor([request.prompt], device=self._model.device)
        result = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=list(request.eos) or None,
            pad_token_id=request.eos[0] if request.eos else 0,
        )
        return tuple(result[0, prompt.shape[1] :].tolist())
