"""From a request's grammar to its row's place in it, on worker threads; and all rows' masks of a step at once.

    1. `start` compiles a request's grammar on a worker thread; the request is queued when `ready` returns it. Equal
       grammars are compiled once. The vocabulary is read on the same threads: when the engine is first idle, or else
       when the first grammar comes.
    2. After a step's tokens are committed, the loop has moved every row on by its token (`RowGrammar.advance`).
    3. While the next step's forward pass runs, `masks` makes its rows' masks, in parallel and outside the interpreter,
       and the loop launches `runner.constrain` with them. So a row under a grammar never sits out a step, and its batch
       mates wait only for what a mask takes longer than a forward pass.

Limits: llguidance's own fuel stops an exponential grammar, when it is compiled and in every mask (about 15 ms at
worst); a compilation takes COMPILE_SECONDS at most; `validate` limits a grammar's length, `json_schema` its depth.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par

from onechip.chat.vocabulary import Vocabulary
from onechip.engine.grammar import Bits, Dead, RowGrammar, RowMask, first_line
from onechip.engine.lark import lark_of
from onechip.engine.sequence import Sequence
from onechip.errors import InvalidRequest
from onechip.request import Grammar

log = logging.getLogger("onechip.engine")

COMPILE_SECONDS = 10.0
COMPILERS = 2
REMEMBERED = 64  # compiled grammars kept for requests to come
IDLE_WAIT_S = 0.005

Index = tuple[LLTokenizer, Bits]


@dataclass
class _Job:
    """A grammar being compiled; `started` when its turn came and the vocabulary was there."""

    future: Future[RowGrammar] = field(default_factory=Future[RowGrammar])
    started: float = math.inf


class GrammarCompiler:
    """Compiles grammars and makes masks for one engine. `vocabulary` is called once, on a worker thread."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary | None],
        vocab_size: int,
        eos_ids: Iterable[int],
    ):
        self._read = vocabulary
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._limits = LLParserLimits(verbose_errors=False)
        self._executor = LLExecutor()
        self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._index: Future[Index] | None = None
        self._lock = Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._pending: dict[Sequence, _Job] = {}

    def __len__(self) -> int:
        """How many requests wait for their grammar."""
        return len(self._pending)

    def warm(self) -> None:
        """Index the vocabulary now, so that the first grammar need not wait for it."""
        if self._index is None:
            self._index = self._pool.submit(self._build_index)

    def start(self, sequence: Sequence) -> None:
        """Begin to compile the grammar of a sequence."""
        self.warm()
        job = self._pending[sequence] = _Job()
        job.future = self._pool.submit(self._place, sequence, job)

    def drop(self, sequence: Sequence) -> None:
        """Nobody waits for the sequence's grammar any more."""
        job = self._pending.pop(sequence, None)
        if job is not None:
            job.future.cancel()

    def ready(self, *, wait: bool) -> list[tuple[Sequence, RowGrammar | InvalidRequest]]:
        """The sequences whose grammar is compiled, or cannot be. `wait`: a moment, when there is nothing else to do."""
        if wait and self._pending:
            futures = [job.future for job in self._pending.values()]
            wait_for(futures, IDLE_WAIT_S, return_when=FIRST_COMPLETED)
        found: list[tuple[Sequence, RowGrammar | InvalidRequest]] = []
        for sequence, job in self._pending.items():
            if job.future.done():
                found.append((sequence, _outcome(sequence, job.future)))
            elif time.monotonic() - job.started > COMPILE_SECONDS:
                found.append((sequence, _too_slow(sequence)))
        for sequence, _ in found:
            del self._pending[sequence]
        return found

    def masks(self, rows: Mapping[int, RowGrammar]) -> dict[int, RowMask | Dead]:
        """What each row may choose next, by row index."""
        words = np.zeros((len(rows), -(-self._vocab_size // 32)), np.int32)
        asked = [
            (grammar.matcher, place)
            for place, grammar in enumerate(rows.values())
            if not grammar.in_thought
        ]
        if asked:
            fill_next_token_bitmask_par(self._executor, asked, words)
        filled = words.view(np.uint32)
        return {
            index: grammar.mask(filled[place])
            for place, (index, grammar) in enumerate(rows.items())
        }

    def _place(self, sequence: Sequence, job: "_Job") -> RowGrammar:
        request = sequence.request
        assert request.grammar is not None and self._index is not None
        tokenizer, bits = self._index.result()
        job.started = time.monotonic()
        matcher = self._matcher(request.grammar, tokenizer)
        allowed = request.sampling.allowed_token_ids
        return RowGrammar(request.grammar, matcher, bits, request.stop_ids, allowed)

    def _matcher(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(grammar)
        if known is None:
            known = self._compile(grammar, tokenizer)
        with self._lock:
            self._compiled[grammar] = known
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
        return known.deep_copy()

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        text = LLMatcher.grammar_from_lark(lark_of(grammar))
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=self._limits)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest(
                f"{grammar.param} cannot be enforced: {first_line(matcher.get_error())}; change it",
                param=grammar.param,
            )
        if not any(mask) or (matcher.is_stopped() and not matcher.is_accepting()):
            raise InvalidRequest(
                f"{grammar.param} allows no text at all; change it", param=grammar.param
            )
        return matcher

    def _build_index(self) -> Index:
        vocabulary = self._read()
        if vocabulary is None:
            raise InvalidRequest(
                "this model has no tokenizer: no structure of its text can be enforced",
                param="structured_outputs",
            )
        bits = Bits.of(self._vocab_size, vocabulary.special_ids, self._eos_ids)
        return _lltokenizer(vocabulary, self._vocab_size, self._eos_ids), bits


def _lltokenizer(vocabulary: Vocabulary, size: int, eos_ids: list[int]) -> LLTokenizer:
    """llguidance's index of the vocabulary: 1.6 s for 262,144 tokens, during which no other Python runs."""
    pieces, special = vocabulary.pieces, vocabulary.special_ids

    def piece(token: int) -> bytes:
        raw = pieces[token] if token < len(pieces) else b""
        return b"\xff" + raw if token in special else raw  # llguidance's mark of control tokens

    class Source:
        eos_token_id = eos_ids[0]
        bos_token_id = None
        tokens = tuple(piece(token) for token in range(size))
        special_token_ids = tuple(sorted(special))

        def __call__(self, text: bytes | str) -> list[int]:
            """Only asked in order to force one spelling, which our grammars never do (`lark.NO_FORCING`)."""
            return []

    return LLTokenizer(TokenizerWrapper(Source()), n_vocab=size, eos_token=eos_ids)


def _outcome(sequence: Sequence, future: Future[RowGrammar]) -> RowGrammar | InvalidRequest:
    error = future.exception()
    if error is None or isinstance(error, InvalidRequest):
        return error or future.result()
    # A user's grammar must not end the engine, whatever it does to the compiler.
    log.error("a grammar broke the compiler", exc_info=error)
    assert sequence.request.grammar is not None
    param = sequence.request.grammar.param
    return InvalidRequest(f"{param} cannot be compiled: {error}; change it", param=param)


def _too_slow(sequence: Sequence) -> InvalidRequest:
    assert sequence.request.grammar is not None
    param = sequence.request.grammar.param
    return InvalidRequest(
        f"{param} was not compiled within {COMPILE_SECONDS:g} s; make it simpler", param=param
    )
