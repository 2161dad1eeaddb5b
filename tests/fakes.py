"""Test doubles of the engine and small tokenizers, for tests of the wire, the server and `chat` without a device."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onechip.config import EngineConfig
from onechip.engine.validate import check_request
from onechip.errors import Overloaded
from onechip.request import EngineInfo, EngineStats, Event, Request, TokenLogprobs

Script = Sequence[int]


@dataclass
class Row:
    request: Request
    generated: int = 0
    last: int = 0
    aborted: bool = False


@dataclass
class FakeEngine:
    """An engine without a model: the next token is the last plus one, or the next of a script.

    `script` (for all) or `scripts` (by the prompt's ids) name the tokens; a script that ends repeats its last id.
    Log probabilities follow a fixed rule: the chosen token has -0.5, the j-th best (chosen + j) has -0.5 - j.
    `sleep` seconds a step; `per_step` tokens a row and step; `break_at` raises in that step.
    """

    vocab_size: int = 600
    max_model_len: int = 256
    max_seqs: int = 256
    max_waiting: int = 1024
    sleep: float = 0.0
    per_step: int = 1
    script: Script | None = None
    scripts: Mapping[tuple[int, ...], Script] = field(default_factory=dict)
    break_at: int | None = None
    rows: dict[str, Row] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    steps: int = 0
    generated: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            self.vocab_size,
            self.max_model_len,
            self.max_seqs,
            4096,
            "fake",
            "float32",
            0.1,
            0.2,
            0.3,
            page_size=16,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self.waiting)

    def close(self) -> None:
        """Nothing is left open."""

    def idle(self) -> None:
        pass

    def submit(self, request: Request) -> None:
        check_request(request, self.info)
        if len(self.waiting) >= self.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests wait already; retry later")
        self.seen.append(request)
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        if request_id in self.rows:
            self.rows[request_id].aborted = True
            self.aborted.append(request_id)
        for request in self.waiting:
            if request.id == request_id:
                self.rows[request_id] = Row(request, aborted=True)
                self.aborted.append(request_id)
        self.waiting = [request for request in self.waiting if request.id != request_id]

    def step(self) -> list[Event]:
        if self.steps == self.break_at:
            raise RuntimeError("the fake engine was told to break")
        self.steps += 1
        if self.sleep:
            time.sleep(self.sleep)
        while self.waiting and len(self.rows) < self.max_seqs:
            request = self.waiting.pop(0)
            self.rows[request.id] = Row(request, last=request.prompt_ids[-1])
            self.prompt_tokens += len(request.prompt_ids)
        events = [self._advance(row) for row in self.rows.values()]
        for event in events:
            if event.finish:
                del self.rows[event.request_id]
        return events

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.rows),
            waiting=len(self.waiting),
            kv_usage=len(self.rows) / self.max_seqs,
            pages_total=256,
            pages_free=256 - len(self.rows),
            preemptions=self.preemptions,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated,
        )

    def _advance(self, row: Row) -> Event:
        request, sampling = row.request, row.request.sampling
        if row.aborted:
            return Event(request.id, finish="abort")
        first = row.generated == 0
        ids: list[int] = []
        finish = stopped_by = None
        while finish is None and len(ids) < self.per_step:
            ids.append(self._next(row))
            row.generated += 1
            row.last = ids[-1]
            if ids[-1] in request.stop_ids and row.generated > sampling.min_tokens:
                finish, stopped_by = "stop", ids[-1]
            elif row.generated == sampling.max_tokens:
                finish = "length"
        self.generated += len(ids)
        return Event(
            request_id=request.id,
            token_ids=tuple(ids),
            logprobs=tuple(self._logprobs(i, sampling.logprobs) for i in ids)
            if sampling.logprobs is not None
            else (),
            prompt_logprobs=self._prompt(request) if first else None,
            finish=finish,
            stopped_by=stopped_by,
            queued_s=0.0 if first else None,
        )

    def _next(self, row: Row) -> int:
        script = self.scripts.get(row.request.prompt_ids, self.script)
        if script is None:
            return (row.last + 1) % self.vocab_size
        return script[min(row.generated, len(script) - 1)]

    def _prompt(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        count = request.sampling.prompt_logprobs
        if count is None:
            return None
        return (None, *(self._logprobs(i, count) for i in request.prompt_ids[1:]))

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        top = tuple((token + j) % self.vocab_size for j in range(count))
        return TokenLogprobs(token, -0.5, top, tuple(-0.5 - j for j in range(count)))


def build(model: str, config: EngineConfig) -> FakeEngine:
    """The fake behind `engine.process.run`: the model string tells how it shall behave."""
    from onechip.errors import CheckpointError

    match Path(model).name.split(":"):
        case ["missing"]:
            raise CheckpointError("missing: no such file")
        case ["bug"]:
            raise RuntimeError("a bug in the builder")
        case ["loading", seconds]:
            time.sleep(float(seconds))
            return FakeEngine()
        case ["break", step]:
            return FakeEngine(break_at=int(step), sleep=0.01)
        case ["slow", seconds]:
            return FakeEngine(sleep=float(seconds), max_model_len=config.max_model_len or 4096)
        case _:
            return FakeEngine()
