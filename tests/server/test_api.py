"""OpenAI's API as clients see it: shapes, counts, stops, log probabilities, and streams that equal whole answers."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, Running, error, ok, running, until
from tests.tiny_tokenizer import BOS, EOS, TURN_END, byte_ids, tiny

SENTENCE = "The quick brown fox jumps"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as it:
        yield it


@pytest.fixture
def script(server: Running) -> Iterator[FakeEngine]:
    """The engine, whose script a test may set."""
    yield server.engine
    server.engine.script = None
    server.engine.per_step = 1
    server.engine.sleep = 0.0


def gather(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a stream said, by choice, in the form of whole choices."""
    said: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "finish": [], "logprobs": [], "roles": 0}
    )
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = said[choice["index"]]
            delta = choice.get("delta", {})
            one["text"] += delta.get("content", choice.get("text", "")) or ""
            one["roles"] += delta.get("role") == "assistant"
            assert not one["finish"], "news after the end"
            if choice["finish_reason"]:
                one["finish"].append(choice["finish_reason"])
            if choice["logprobs"]:
                one["logprobs"].append(choice["logprobs"])
    return dict(said)


FIELDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"stop": ["own fox"]},
    {"stop": ["own f", "brown"], "include_stop_str_in_output": True},
    {"stop": ["fox jumped"]},
    {"n": 3},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "stop": "fox"},
    {"min_tokens": 4, "stop": "quick"},
    {"stop_token_ids": [387]},
    {"ignore_eos": True},
]


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("fields", FIELDS, ids=lambda f: json.dumps(f)[:40])
def test_a_chat_stream_says_what_the_whole_answer_says(
    server: Running, script: FakeEngine, fields: dict[str, Any], per_step: int
):
    script.script = [*tiny().encode(SENTENCE), EOS]
    script.per_step = per_step
    fields = {"max_tokens": 9, "seed": 1} | fields
    whole = server.chat(**fields)
    chunks = server.stream_chat(**fields, stream_options={"include_usage": True})
    said = gather(chunks)
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert sorted(said) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        one = said[choice["index"]]
        assert one["text"] == choice["message"]["content"]
        assert one["finish"] == [choice["finish_reason"]]
        assert one["roles"] == 1
        content = [entry for part in one["logprobs"] for entry in part["content"]]
        assert content == ((choice["logprobs"] or {}).get("content") or [])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"echo": True, "max_tokens": 0, "logprobs": 0},
        {"stop": "fox", "logprobs": 0},
        {"n": 2, "echo": True},
    ],
    ids=json.dumps,
)
def test_a_completion_stream_says_what_the_whole_answer_says(
    server: Running, script: FakeEngine, fields: dict[str, Any]
):
    script.script = [*tiny().encode(SENTENCE), EOS]
    prompts = ["The fox", "é"]
    whole = server.complete(prompts, **fields)
    chunks = server.stream(
        "/v1/completions", prompt=prompts, stream_options={"include_usage": True}, **fields
    )
    said = gather(chunks)
    assert chunks[-1]["usage"] == whole["usage"]
    assert sorted(said) == list(range(len(whole["choices"])))
    for choice in whole["choices"]:
        one = said[choice["index"]]
        assert one["text"] == choice["text"]
        assert one["finish"] == [choice["finish_reason"]]
        joined: dict[str, list[Any]] = {}
        for part in one["logprobs"]:
            for key, values in part.items():
                joined[key] = joined.get(key, []) + values
        assert joined == (choice["logprobs"] or {})


@pytest.mark.parametrize(
    ("stop", "text", "included", "finish"),
    [
        (["own fox"], "The quick br", "The quick brown fox", "stop"),
        (["own f", "brown"], "The quick ", "The quick brown", "stop"),
        (["zzz", "fox"], "The quick brown ", "The quick brown fox", "stop"),
        (["T"], "", "T", "stop"),
        (["fox jumped"], SENTENCE, SENTENCE, "length"),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_the_text_wherever_tokens_split_them(
    server: Running,
    script: FakeEngine,
    stop: list[str],
    text: str,
    included: str,
    finish: str,
    include: bool,
):
    for ids in (tiny().encode(SENTENCE), byte_ids(SENTENCE)):
        script.script = ids
        fields = {
            "max_tokens": len(ids),
            "stop": stop,
            "include_stop_str_in_output": include,
        }
        chat = server.chat(**fields)["choices"][0]
        completion = server.complete(**fields)["choices"][0]
        streamed = gather(server.stream_chat(**fields))[0]
        wanted = included if include else text
        assert chat["message"]["content"] == completion["text"] == streamed["text"] == wanted
        assert chat["finish_reason"] == completion["finish_reason"] == finish
        assert streamed["finish"] == [finish]
        assert chat["stop_reason"] == (None if finish == "length" else stop[-1])


def test_a_stop_string_counts_tokens_up_to_the_one_that_completed_it(
    server: Running, script: FakeEngine
):
    script.script = byte_ids(SENTENCE)
    usage = server.chat(stop="quick", max_tokens=25)["usage"]
    assert usage["completion_tokens"] == len("The quick")


def test_usage_counts_the_prompt_once_and_sums_the_choices(server: Running, script: FakeEngine):
    script.script = [*tiny().encode("The fox"), EOS]
    one = server.complete("é", max_tokens=50)["usage"]
    three = server.complete("é", max_tokens=50, n=3)["usage"]
    two = server.complete(["é", "é"], max_tokens=50)["usage"]
    assert one["prompt_tokens"] == 2
    assert three == {
        "prompt_tokens": 2,
        "completion_tokens": 3 * one["completion_tokens"],
        "total_tokens": 2 + 3 * one["completion_tokens"],
    }
    assert two["prompt_tokens"] == 4
    assert two["completion_tokens"] == 2 * one["completion_tokens"]


def test_choices_of_one_request_draw_with_different_seeds(server: Running):
    server.engine.seen.clear()
    server.chat(n=3, seed=5, max_tokens=1)
    server.chat(seed=5, max_tokens=1)
    seeds = [request.sampling.seed for request in server.engine.seen]
    assert len(set(seeds[:3])) == 3
    assert seeds[0] == seeds[3] == 5
    server.engine.seen.clear()
    for _ in range(5):
        server.chat(max_tokens=1)
    assert len({request.sampling.seed for request in server.engine.seen}) == 5


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_id_shows_no_text_and_no_entry_unless_included(
    server: Running, script: FakeEngine, include: bool
):
    fox = tiny().encode(SENTENCE)[3]
    script.script = [*tiny().encode(SENTENCE)]
    answer = server.chat(
        stop_token_ids=[fox], include_stop_str_in_output=include, logprobs=True, max_tokens=9
    )
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "The quick brown" + " fox" * include
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", fox)
    assert answer["usage"]["completion_tokens"] == 4
    assert len(choice["logprobs"]["content"]) == 3 + include


@pytest.mark.parametrize("stop_id", [EOS, TURN_END])
def test_every_stop_id_of_the_model_ends_with_empty_text(
    server: Running, script: FakeEngine, stop_id: int
):
    script.script = [stop_id]
    answer = server.chat(max_tokens=8)
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    ignored = server.chat(max_tokens=8, ignore_eos=True)
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["choices"][0]["message"]["content"] == ""
    assert ignored["usage"]["completion_tokens"] == 8
    shown = server.chat(max_tokens=2, ignore_eos=True, skip_special_tokens=False)
    assert shown["choices"][0]["message"]["content"] == 2 * tiny().piece_bytes(stop_id).decode()


def test_characters_split_over_tokens_are_never_cut(server: Running, script: FakeEngine):
    text = "日本 👩‍💻 é"
    script.script = byte_ids(text)
    chunks = server.stream_chat(max_tokens=len(script.script))
    assert gather(chunks)[0]["text"] == text
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)
    script.script = byte_ids("日本")[:4]
    cut = server.chat(max_tokens=4)["choices"][0]["message"]["content"]
    assert cut == gather(server.stream_chat(max_tokens=4))[0]["text"] == "日\ufffd"


def test_text_is_visible_at_once_unless_it_begins_a_stop(server: Running, script: FakeEngine):
    script.script = byte_ids("a" * 30)
    script.sleep = 0.02
    chunks = server.stream_chat(max_tokens=30, stop=["0123456789ABCDEF"])
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert 1 <= len(texts[1]) <= 2
    assert sum(map(bool, texts)) >= 10


def test_chat_logprobs_have_text_bytes_and_alternatives(server: Running, script: FakeEngine):
    script.script = [*tiny().encode("The"), *byte_ids("é")]
    answer = server.chat(max_tokens=3, logprobs=True, top_logprobs=5)
    the, first, second = answer["choices"][0]["logprobs"]["content"]
    assert (the["token"], the["bytes"], the["logprob"]) == ("The", [84, 104, 101], -0.5)
    assert (first["token"], first["bytes"]) == ("bytes:\\xc3", [0xC3])
    assert second["bytes"] == [0xA9]
    tops = [t["logprob"] for t in the["top_logprobs"]]
    assert tops == sorted(tops, reverse=True)
    assert len(tops) == 5
    assert the["top_logprobs"][0]["token"] == "The"
    plain = server.chat(max_tokens=3, logprobs=True)
    assert [e["top_logprobs"] for e in plain["choices"][0]["logprobs"]["content"]] == [[], [], []]
    assert server.chat(max_tokens=3)["choices"][0]["logprobs"] is None


def test_completion_logprobs_have_offsets_into_the_text(server: Running, script: FakeEngine):
    script.script = tiny().encode(SENTENCE)
    choice = server.complete("The", echo=True, logprobs=2, max_tokens=5)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "The" + SENTENCE
    assert logprobs["tokens"][:2] == ["<bos>", "The"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)
    for token, value, top in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] == value


def test_prompt_logprobs_come_in_the_shape_of_vllm(server: Running):
    choice = server.complete([BOS, 40, 41], prompt_logprobs=1, max_tokens=1)["choices"][0]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second["40"]["logprob"] == -0.5 and second["40"]["rank"] == 1
    assert third["41"]["decoded_token"]
    chat = server.chat(prompt_logprobs=0, max_tokens=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_echo_alone_gives_the_prompt_back(server: Running):
    answer = server.complete("The fox", echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "The fox"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    ids = tiny().encode("The fox")
    assert server.complete(ids, echo=True, max_tokens=0)["choices"][0]["text"] == "The fox"


def test_prompts_get_exactly_one_bos_and_ids_are_verbatim(server: Running):
    def prompt_of(prompt: Any, **fields: Any) -> tuple[int, ...]:
        server.engine.seen.clear()
        server.complete(prompt, max_tokens=1, **fields)
        return server.engine.seen[0].prompt_ids

    the = tiny().encode("The")
    assert prompt_of("The") == (BOS, *the)
    assert prompt_of("<bos>The") == (BOS, *the)
    assert prompt_of("The", add_special_tokens=False) == tuple(the)
    assert prompt_of(the) == tuple(the)
    assert prompt_of([BOS, *the]) == (BOS, *the)
    server.engine.seen.clear()
    server.chat("<bos>x", max_tokens=1)
    ids = server.engine.seen[0].prompt_ids
    assert ids[0] == BOS and BOS not in ids[1:]


def test_max_tokens_defaults_and_aliases(server: Running):
    assert server.complete("é", ignore_eos=True)["usage"]["completion_tokens"] == 16
    whole = server.chat(ignore_eos=True)["usage"]
    assert whole["total_tokens"] == server.engine.max_model_len
    assert server.chat(max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    both = server.chat(max_completion_tokens=3, max_tokens=5)["usage"]
    assert both["completion_tokens"] == 3


def test_the_context_is_never_exceeded_and_errors_say_both_numbers(server: Running):
    limit = server.engine.max_model_len
    for stream in (False, True):
        for length, fields in (
            (limit, {}),
            (limit + 1, {"max_tokens": 1}),
            (10_000, {"max_tokens": 1}),
            (10, {"max_tokens": limit - 9}),
        ):
            refused = error(
                server.post("/v1/completions", prompt=[40] * length, stream=stream, **fields), 400
            )
            assert refused["code"] == "context_length_exceeded"
            assert refused["type"] == "invalid_request_error"
            assert str(limit) in refused["message"]
    last = server.complete([40] * (limit - 1), max_tokens=1)
    assert last["choices"][0]["finish_reason"] == "length"
    long = error(server.post("/v1/chat/completions", messages=[user("The " * 300)]), 400)
    assert long["code"] == "context_length_exceeded" and long["param"] == "messages"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_usage_is_streamed_only_when_asked_for_and_continuously_if_so(server: Running):
    plain = server.stream_chat(max_tokens=3)
    assert all("usage" not in chunk for chunk in plain)
    each = server.stream_chat(
        max_tokens=3, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in each]
    assert counts == sorted(counts) and counts[-1] == 3


def test_generation_defaults_apply_unless_the_request_says_otherwise():
    defaults = {"temperature": 0.5, "top_p": 0.9, "top_k": 64, "max_length": 20}
    with running(defaults=defaults) as server:
        server.chat(max_tokens=1)
        server.chat(max_tokens=1, temperature=0, top_k=-1)
        server.complete(max_tokens=1)
        first, second, third = (request.sampling for request in server.engine.seen)
    assert (first.temperature, first.top_p, first.top_k) == (0.5, 0.9, 64)
    assert (second.temperature, second.top_p, second.top_k) == (0, 0.9, 0)
    assert third.top_k == 64


def test_every_sampling_field_reaches_the_engine(server: Running):
    server.engine.seen.clear()
    server.complete(
        "é",
        max_tokens=2,
        min_tokens=1,
        min_p=0.1,
        top_k=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"40": 5, "41": -1.5},
        allowed_token_ids=[40, 41],
        stop_token_ids=[41],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
        seed=2**63 - 1,
        user="me",
    )
    request = server.engine.seen[0]
    got = request.sampling
    assert (got.min_tokens, got.min_p, got.top_k) == (1, 0.1, 3)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (0.5, -0.5, 1.1)
    assert got.logit_bias == {40: 5.0, 41: -1.5}
    assert got.allowed_token_ids == (40, 41)
    assert request.stop_ids == (41,)
    assert (got.logprobs, got.prompt_logprobs, got.seed) == (3, 2, 2**63 - 1)
    server.complete("é", max_tokens=2, stop_token_ids=[41])
    assert server.engine.seen[1].stop_ids == (EOS, TURN_END, 41)


def test_models_are_listed_and_aliases_are_echoed(server: Running):
    listed = ok(server.http.get("/v1/models"))["data"]
    assert [card["id"] for card in listed] == [MODEL]
    assert listed[0]["max_model_len"] == server.engine.max_model_len
    assert ok(server.http.get(f"/v1/models/{MODEL}"))["id"] == MODEL
    assert error(server.http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert server.chat(max_tokens=1)["model"] == MODEL


def test_tokenize_and_detokenize_are_inverse(server: Running):
    found = ok(server.post("/tokenize", prompt="The fox", return_token_strs=True))
    assert found["tokens"][0] == BOS and found["count"] == len(found["tokens"])
    assert found["token_strs"][:2] == ["<bos>", "The"]
    assert ok(server.post("/detokenize", tokens=found["tokens"][1:]))["prompt"] == "The fox"
    bare = ok(server.post("/tokenize", prompt="The fox", add_special_tokens=False))
    assert bare["tokens"] == found["tokens"][1:]
    chat = ok(server.post("/tokenize", messages=[user("hi")]))
    server.engine.seen.clear()
    server.chat("hi", max_tokens=1)
    assert tuple(chat["tokens"]) == server.engine.seen[0].prompt_ids
    assert error(server.post("/detokenize", tokens=[10**6]), 400)["param"] == "tokens"
    assert error(server.post("/tokenize", {}), 400)["param"] == "prompt"


def test_the_openai_client_works(server: Running, script: FakeEngine):
    script.script = [*tiny().encode(SENTENCE), EOS]
    client = server.openai
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=20,
    )
    assert answer.choices[0].message.content == SENTENCE
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": [{"type": "text", "text": "more"}]},
        ],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"min_p": 0.1, "top_k": 5},
    )
    texts = ["", ""]
    usage = None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == [SENTENCE] * 2
    assert usage and usage.completion_tokens == 12
    completion = client.completions.create(model=MODEL, prompt=["a", "b"], echo=True, logprobs=1)
    assert [c.text[0] for c in completion.choices] == ["a", "b"]
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_metrics_equal_the_usage_that_clients_were_told(script: FakeEngine):
    with running() as server:
        told = [server.chat(max_tokens=4)["usage"] for _ in range(3)]
        told.append(server.complete("a", n=2, max_tokens=3, ignore_eos=True)["usage"])
        error(server.post("/v1/completions", prompt="a", temperature=9), 400)
        assert server.metric("onechip_prompt_tokens_total") == sum(u["prompt_tokens"] for u in told)
        generated = sum(u["completion_tokens"] for u in told)
        assert server.metric("onechip_generation_tokens_total") == generated
        assert server.metric("onechip_time_to_first_token_seconds_count") == 5
        assert server.metric("onechip_request_latency_seconds_count") == 5
        assert server.metric("onechip_requests_aborted_total") == 0
        assert server.metric('onechip_requests_finished_total{reason="length"}') == 5
        until(lambda: server.metric("onechip_requests_running") == 0)
        assert server.metric("onechip_compiles_since_ready") == 0
        assert server.metric("onechip_engine_up") == 1


def test_gemma4_turns_are_used_where_the_tokenizer_has_them():
    with running(family="gemma4") as server:
        tokens = ok(server.post("/tokenize", messages=[user("hi")]))["tokens"]
        text = tiny("gemma4").decode(tokens, skip_special=False)
        assert text == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
        refused = error(server.post("/v1/completions", prompt="a<|image|>b"), 400)
        assert refused["param"] == "prompt" and "placeholder" in refused["message"]
