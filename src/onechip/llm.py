"""The offline API: `LLM` runs the engine in this process, behind the same validation as the server.

Texts are tokenised and detokenised here; the engine sees ids. One `LLM` is for one thread.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from onechip.chat.controls import after_thought, controls_of, prompt_end
from onechip.chat.output import ChoiceOutput, Finish
from onechip.chat.parts import Call, Gathered
from onechip.chat.reading import Reading
from onechip.chat.schemas import tool_schemas
from onechip.chat.template import choose
from onechip.chat.tokenizer import Tokenizer, load_tokenizer
from onechip.chat.tools import declared
from onechip.checkpoint.source import default_cache_dir, open_checkpoint
from onechip.config import EngineConfig
from onechip.engine.build import build_from
from onechip.engine.progress import Reporter
from onechip.engine.runner import DeviceRunner
from onechip.engine.validate import check_prompt, grammar_of, prepare
from onechip.errors import ConfigError, OnechipError
from onechip.model.spec import model_config
from onechip.request import Event, Request, SamplingParams, TokenLogprobs

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """What became of one prompt (one choice of it). `logprobs` is parallel to `token_ids` when asked for.

    Of a chat, `text` is the content, beside the thought (`reasoning`) and the calls; a call's arguments are JSON text.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: Finish
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[Call, ...] = ()


class LLM:
    """A loaded model. Keywords are the fields of `EngineConfig`, the flags of `onechip serve`.

    Programs are compiled when first used (and kept in the persistent cache); `precompile=True` compiles all at once.
    """

    def __init__(self, model: str, *, report: Reporter | None = None, **flags: Any):
        unknown = flags.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ConfigError(f"unknown keyword {', '.join(sorted(unknown))}; LLM takes {known}")
        flags.setdefault("precompile", False)
        config = EngineConfig(**flags)
        checkpoint = open_checkpoint(model, random_weights=config.random_weights)
        self.config = model_config(checkpoint.config)
        self.engine = build_from(checkpoint, self.config, config, report or Reporter())
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint, default_cache_dir())
        self._checkpoint = checkpoint
        self._ids = count()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt, all in one batch; in order, n completions each. Texts get one BOS.

        Raises InvalidRequest for a bad value and, if the engine fails a request, its error.
        """
        each = (
            [params or SamplingParams()] * len(prompts)
            if not isinstance(params, Sequence)
            else params
        )
        if len(each) != len(prompts):
            raise ConfigError(
                f"{len(prompts)} prompts but {len(each)} SamplingParams; give one for each"
            )
        requests: list[Request] = []
        for prompt, one in zip(prompts, each, strict=True):
            ids = self._encode(prompt)
            key = f"llm-{next(self._ids)}"
            requests += prepare(key, ids, one, self.engine.info, self.config.eos_ids)
        return self._run(requests)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> Completion:
        """Answer a conversation through the checkpoint's chat template. max_tokens None: to the end of the context.

        `tools`: in OpenAI's shape; only with them are calls read. `variables` go to the template. With
        structured_outputs and enable_thinking=True the structure begins where the thought ends.
        """
        tokenizer = self._require_tokenizer()
        source = self._checkpoint.source
        thought = self.config.ple_dim == 0
        template = choose(
            tokenizer, self._checkpoint.chat_template, origin=source, empty_thought=thought
        )
        if template is None:
            raise ConfigError(f"{source} has no chat template and no turn tokens; use generate")
        ids = template.encode(messages, tools=declared(tools), variables=variables)
        controls = controls_of(tokenizer)
        chosen, grammar = params or SamplingParams(max_tokens=None), None
        if chosen.structured_outputs is not None:
            grammar = after_thought(
                grammar_of(chosen.structured_outputs),
                controls,
                ids,
                thinking=variables.get("enable_thinking") is True,
            )
        key, info = f"llm-{next(self._ids)}", self.engine.info
        requests = prepare(key, ids, chosen, info, self.config.eos_ids, grammar=grammar)
        schemas = tool_schemas(tools) if tools else None
        return self._run(list(requests), Reading(controls, prompt_end(ids, controls), schemas))[0]

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [n, V]: logits after each of n tokens, through the paged path, chunk by chunk."""
        runner = self.engine.runner
        assert isinstance(runner, DeviceRunner)
        info = self.engine.info
        check_prompt(tuple(token_ids), vocab_size=info.vocab_size)
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, seed=0)
        hidden: list[np.ndarray] = []
        # Positions that predict a prompt token are scored: one more token, never seen, makes the last one so.
        ids = (*token_ids, token_ids[0])
        key = f"llm-{next(self._ids)}"
        (request,) = prepare(key, ids, sampling, info, self.config.eos_ids)
        self.engine.submit(request)
        launched, wanted = self.engine.steps, len(token_ids)
        while wanted > 0:
            self.engine.step()
            if self.engine.steps > launched:
                launched, last = self.engine.steps, self.engine.flying[-1]
                hidden.append(np.asarray(last.out.hidden)[: last.plan.tokens])
                wanted -= len(hidden[-1])
        self._cancel([request.id])
        return runner.logits(np.concatenate(hidden))[: len(token_ids)]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        tokenizer = self._require_tokenizer()
        return (tokenizer.bos_id, *tokenizer.encode(prompt))

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                f"{self._checkpoint.source} has no tokenizer; give prompts as lists of token ids"
            )
        return self.tokenizer

    def _cancel(self, keys: Iterable[str]) -> None:
        """Abort requests and let their steps land: the next call must not meet their events."""
        for key in keys:
            self.engine.abort(key)
        while self.engine.has_work:
            self.engine.step()

    def _run(self, requests: list[Request], reading: Reading | None = None) -> list[Completion]:
        answers = {request.id: _Answer(request, self.tokenizer, reading) for request in requests}
        engine, unsent = self.engine, deque(requests)
        try:
            while unsent or engine.has_work:
                while unsent and len(engine.scheduler.waiting) < engine.max_waiting:
                    engine.submit(unsent.popleft())
                for event in engine.step():
                    if answers[event.request_id].push(event):
                        engine.abort(event.request_id)
        finally:  # nothing to do unless an error or Ctrl-C ended the loop
            self._cancel(request.id for request in requests)
        return [answers[request.id].completion() for request in requests]


class _Answer:
    """Gathers one request's events into a Completion."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, reading: Reading | None):
        if tokenizer is None and request.sampling.stop:
            raise ConfigError(
                "stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids"
            )
        self.output = (
            None
            if tokenizer is None
            else ChoiceOutput(tokenizer, request.sampling, reading=reading)
        )
        self.said = Gathered()
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt: tuple[TokenLogprobs | None, ...] | None = None
        self.finish: Finish | None = None

    def push(self, event: Event) -> bool:
        """Take an event; True when a stop string has ended the text and the engine need not go on."""
        if event.finish == "error":
            raise OnechipError(
                event.error or "the engine failed the request",
                param=event.error_param,
                code=event.error_code,
            )
        if self.finish is not None:
            return False  # tokens after a stop string, or the end of the abort it caused
        self.prompt = self.prompt or event.prompt_logprobs
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        self.finish = event.finish
        if self.output is None or event.finish == "abort":
            return False
        delta = self.output.push(event)
        self.said.add(delta.pieces)
        self.finish = delta.finish
        return delta.stop_hit

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            tuple(self.tokens),
            self.said.content,
            self.finish,
            tuple(self.logprobs),
            self.prompt,
            self.said.reasoning,
            tuple(self.said.calls),
        )
