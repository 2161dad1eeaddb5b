"""Requests under a grammar through the whole loop, on a device that draws at random from the masks it is given."""

import json
import threading
from typing import Any

import jsonschema
import pytest
from tests.fake_runner import Outcome, fake_engine, gather, request
from tests.grammar_walk import EOS, text_of

from onechip.engine import grammar_compiler
from onechip.engine.loop import Engine, run_until_idle
from onechip.request import Grammar, Request

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "on": {"type": "boolean"},
    },
    "required": ["name", "tags", "on"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))


def constrained(key: str, seed: int = 0, prompt: int = 5, most: int = 150, **kw: Any) -> Request:
    return request(key, prompt, most, EOS, kw.pop("grammar", GRAMMAR), seed=seed, **kw)


def run(engine: Engine, *requests: Request) -> dict[str, Outcome]:
    for one in requests:
        engine.submit(one)
    outcomes = gather(run_until_idle(engine, limit_s=60))
    engine.check_idle()
    return outcomes


def value_of(outcome: Outcome) -> Any:
    assert outcome.finish == "stop" and outcome.stopped_by in EOS, outcome
    return json.loads(text_of(outcome.tokens[:-1]))


def test_every_row_satisfies_its_schema() -> None:
    requests = [constrained(f"r{seed}", seed, prompt=3 + seed) for seed in range(20)]
    for outcome in run(fake_engine(), *requests).values():
        jsonschema.validate(value_of(outcome), SCHEMA)


def test_batch_mates_change_nothing_in_either_direction() -> None:
    """Alone equals together: rows under grammars, and rows that know nothing of them."""
    bound = [constrained(f"g{seed}", seed) for seed in range(6)]
    free = [request(f"f{length}", length, 60) for length in range(1, 5)]
    together = run(fake_engine(max_seqs=6), *bound, *free)
    for one in (*bound, *free):
        assert run(fake_engine(), one)[one.id].tokens == together[one.id].tokens, one.id


def test_a_row_under_a_grammar_never_sits_out_a_step() -> None:
    """Beside free rows it makes as many tokens a step as they do."""
    engine = fake_engine(max_seqs=4)
    run(engine, constrained("g", 3), request("f", 5, 40))
    alone = fake_engine(max_seqs=4)
    tokens = run(alone, constrained("g", 3))["g"].tokens
    assert alone.steps <= len(tokens) + 3


def test_preemption_keeps_the_place_in_the_grammar() -> None:
    requests = [constrained(f"r{seed}", seed, most=60) for seed in range(4)]
    roomy = run(fake_engine(), *requests)
    tight = fake_engine(full_pages=24, sliding_pages=16)
    outcomes = run(tight, *requests)
    assert tight.scheduler.preemptions > 0
    assert {k: o.tokens for k, o in outcomes.items()} == {k: o.tokens for k, o in roomy.items()}
    assert {k: o.finish for k, o in outcomes.items()} == {k: o.finish for k, o in roomy.items()}


def test_an_abort_while_compiling_or_running_leaves_nothing() -> None:
    engine = fake_engine()
    engine.submit(constrained("early"))
    assert engine.stats().waiting == 1
    engine.abort("early")
    assert engine.stats().waiting == 0
    engine.submit(constrained("late"))
    events = []
    while not any(event.token_ids for event in events):
        events += engine.step()
    engine.abort("late")
    outcomes = gather(events + run_until_idle(engine))
    assert {o.finish for o in outcomes.values()} == {"abort"}
    engine.check_idle()


def test_requests_without_a_grammar_do_not_wait_for_one_that_compiles() -> None:
    engine = fake_engine()
    engine.submit(constrained("g"))
    engine.submit(request("f", 5, 3))
    events = []
    while not any(event.request_id == "f" and event.finish for event in events):
        events += engine.step()
    assert engine.stats().waiting in (0, 1)
    assert gather(events + run_until_idle(engine))["g"].finish == "stop"


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar("json_schema", '{"not": {}}', param="response_format"), "not"),
        (Grammar("json_schema", '{"type": "objekt"}', param="response_format"), "objekt"),
        (Grammar("json_schema", "[1]", param="response_format"), "object"),
        (Grammar("json_schema", "{", param="response_format"), "JSON"),
        (Grammar("json_schema", '{"$ref": "#/nope"}', param="response_format"), "nope"),
        (Grammar("json_schema", '{"$ref": "#"}', param="response_format"), "$ref"),
        (Grammar("regex", "(", param="structured_outputs"), "regex"),
        (Grammar("lark", "start: nope", param="guided_grammar"), "nope"),
    ],
)
def test_what_cannot_be_compiled_ends_with_an_error_that_names_field_and_reason(
    grammar: Grammar, word: str
) -> None:
    outcome = run(fake_engine(), constrained("r", grammar=grammar))["r"]
    assert (outcome.finish, outcome.error_code, outcome.tokens) == ("error", "invalid_value", [])
    assert outcome.error_param == grammar.param
    assert outcome.error and word in outcome.error and grammar.param in outcome.error


def test_min_tokens_does_not_hold_back_the_only_end() -> None:
    grammar = Grammar("choice", '["yes", "no"]')
    outcome = run(fake_engine(), constrained("r", grammar=grammar, min_tokens=50))["r"]
    assert text_of(outcome.tokens[:-1]) in ("yes", "no")
    assert outcome.finish == "stop"


def test_ignore_eos_ends_where_nothing_may_follow() -> None:
    one = request("r", 5, 50, (), Grammar("choice", '["yes", "no"]'), ignore_eos=True)
    outcome = run(fake_engine(), one)["r"]
    assert text_of(outcome.tokens) in ("yes", "no")
    assert (outcome.finish, outcome.stopped_by) == ("stop", None)


def test_allowed_ids_that_leave_nothing_are_an_error_and_not_a_free_row() -> None:
    one = constrained("r", grammar=Grammar("choice", '["yes"]'), allowed_token_ids=(300,))
    outcome = run(fake_engine(), one)["r"]
    assert (outcome.finish, outcome.error_code) == ("error", "invalid_value")


def test_a_truncated_structure_ends_with_length() -> None:
    outcome = run(fake_engine(), constrained("r", most=3))["r"]
    assert (outcome.finish, len(outcome.tokens)) == ("length", 3)


def test_a_compilation_that_takes_too_long_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others go on; the thread's late result is nobody's."""
    release = threading.Event()
    engine = fake_engine()
    assert engine.grammars is not None
    run(engine, constrained("warm"))
    slow = engine.grammars._compile
    monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(engine.grammars, "_compile", lambda *a: (release.wait(10), slow(*a))[1])
    stuck = constrained("stuck", grammar=Grammar("choice", '["slow"]', param="guided_choice"))
    outcomes = run(engine, stuck, constrained("known"), request("free", 5, 20))
    release.set()
    assert (outcomes["stuck"].finish, outcomes["stuck"].error_param) == ("error", "guided_choice")
    assert outcomes["known"].finish == "stop" and outcomes["free"].finish == "length"


def test_a_grammar_that_breaks_the_compiler_does_not_break_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fake_engine()
    assert engine.grammars is not None

    def broken(*_: Any) -> Any:
        raise BaseException("a panic in the library")

    monkeypatch.setattr(engine.grammars, "_compile", broken)
    outcomes = run(engine, constrained("r"), request("free", 5, 5))
    assert (outcomes["r"].finish, outcomes["r"].error_code) == ("error", "invalid_value")
    assert outcomes["free"].finish == "length"
