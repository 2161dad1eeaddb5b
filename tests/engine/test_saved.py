"""Executables from a folder give the tokens that fresh ones give, without a trace or a compile; others are refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from tests.tiny_model import write_tiny

from onechip import compilation
from onechip.compilation import Record
from onechip.config import EngineConfig
from onechip.errors import ConfigError

SHAPE: dict[str, Any] = {
    "max_seqs": 2, "max_model_len": 64, "dtype": "float32", "chunk_size": 16, "page_size": 4,
    "random_weights": True, "compile_cache": "off",
}  # fmt: skip

# A process of its own: this one has traced and compiled before.
SERVE = """
import json, sys, time
started = time.monotonic()
from onechip.config import EngineConfig
from onechip.engine import counts
counts.traces()
from onechip.engine.build import build_engine
from onechip.engine.loop import run_until_idle
from onechip.request import Request, SamplingParams
model, shape = sys.argv[1], json.loads(sys.argv[2])
engine = build_engine(model, EngineConfig(**shape))
ready = time.monotonic() - started
for i, kind in enumerate(({}, {"temperature": 0.9, "seed": 3}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.3})):
    sampling = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "seed": 0, **kind})
    engine.submit(Request(str(i), tuple(range(5, 25 + i)), sampling))
tokens = {}
for event in run_until_idle(engine, limit_s=300):
    tokens.setdefault(event.request_id, []).extend(event.token_ids)
# A row under a grammar is sampled by a program of its own; its mask is made by hand, this model has no tokenizer.
from onechip.engine.grammar import RowMask, words_of
kinds = ({}, {"logprobs": 2}, {"temperature": 0.9, "seed": 4})
for i, kind in enumerate(kinds):
    sampling = SamplingParams(**{"max_tokens": 1, "temperature": 0.0, "seed": 0, **kind})
    engine.submit(Request(f"masked-{i}", tuple(range(5, 12)), sampling))
    pending = engine.runner.dispatch(engine.scheduler.plan())
    mask = RowMask(words_of([40 + i, 50 + i], engine.info.vocab_size))
    (result,) = engine.runner.collect(engine.runner.constrain(pending, {0: mask}))
    tokens[f"masked-{i}"] = list(result.tokens)
    engine.abort(f"masked-{i}")
    engine.step()
print(json.dumps({
    "tokens": tokens, "ready": ready, "traces": counts.traces(), "compiles": counts.compiles(),
    "since_ready": engine.stats().compiles_since_ready,
}))
"""


def serve(model: str, **shape: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", SERVE, model, json.dumps({**SHAPE, **shape})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """Compiled by a user who keeps a compile cache: what came out of it could not be saved again."""
    folder, cache = tmp_path_factory.mktemp("programs"), tmp_path_factory.mktemp("cache")
    settings = {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        record = compilation.compile_for(model, "cpu", EngineConfig(**SHAPE), out=folder)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert not list(cache.iterdir()), "the cache was used"
    assert jax.config.jax_enable_compilation_cache
    return folder, record


def test_saved_programs_serve_the_same_tokens_with_no_trace_and_no_compile(
    model: str, saved: tuple[Path, Record]
):
    folder, _ = saved
    cold, warm = serve(model), serve(model, programs=str(folder))
    assert warm["tokens"] == cold["tokens"]
    for i in range(3):
        assert warm["tokens"][f"masked-{i}"][0] in (40 + i, 50 + i)
    assert (warm["traces"], warm["compiles"], warm["since_ready"]) == (0, 0, 0)
    assert cold["traces"] > 0 and cold["compiles"] > 0 and cold["since_ready"] == 0
    assert warm["ready"] < cold["ready"] / 2


def test_programs_for_other_flags_are_refused(model: str, saved: tuple[Path, Record]):
    from onechip.engine.build import build_engine

    shape = {**SHAPE, "max_model_len": 128, "programs": str(saved[0])}
    with pytest.raises(
        ConfigError, match=r"are for shape .* this engine is .*onechip compile --out"
    ):
        build_engine(model, EngineConfig(**shape))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("programs.json", b"{", "programs.json cannot be read"),
        ("admit.bin", b"rubbish", "admit.bin is not what programs.json lists"),
        ("admit.bin", None, "admit.bin: No such file"),
    ],
)
def test_a_damaged_folder_is_refused(
    model: str,
    saved: tuple[Path, Record],
    tmp_path: Path,
    name: str,
    content: bytes | None,
    message: str,
):
    from onechip.engine.build import build_engine

    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        build_engine(model, EngineConfig(**{**SHAPE, "programs": str(tmp_path)}))


def test_the_record_says_what_each_program_costs(saved: tuple[Path, Record]):
    folder, record = saved
    assert json.loads((folder / "record.json").read_text())["programs"][0]["name"] == "admit"
    steps = {p.name: p for p in record.programs if p.tokens}
    assert set(steps) == {"decode-2x2", "mixed-16x2", "score-16x2"}
    assert {"admit", "choose-2"} <= {p.name for p in record.programs}
    for program in steps.values():
        assert program.compile_s > 0 and program.temporary_bytes > 0 and program.launches > 10
        assert program.alias_bytes > record.kv_bytes * 0.9, "K/V and slots are donated"
        assert program.least_bytes > 0 and program.matmul_flops > 0
    assert record.fits and record.tokens_that_fit >= record.kv_tokens > 0
    assert record.memory - record.weight_bytes - record.kv_bytes > record.needs["temporaries"]


def test_a_prompts_early_exit_shows_in_the_matmuls(saved: tuple[Path, Record]):
    """Half of the tiny model's layers own no K/V: a prompt's tokens skip them, a scored prompt's do not."""
    _, record = saved
    steps = {p.name: p for p in record.programs}
    mixed, scored = steps["mixed-16x2"], steps["score-16x2"]
    assert mixed.matmul_flops < 0.8 * scored.matmul_flops
    assert mixed.layer_flops < 0.9 * mixed.full_layer_flops
    assert mixed.full_layer_flops == scored.layer_flops == scored.full_layer_flops
