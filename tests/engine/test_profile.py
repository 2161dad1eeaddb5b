"""A trace holds the launches it was asked for, with the loop's phases named, and ends by itself."""

import gzip
from pathlib import Path

from tests.fake_runner import fake_engine, gather, request

from onechip.engine.loop import run_until_idle
from onechip.engine.profile import Profile


def test_a_trace_is_written_after_so_many_launches_with_the_phases_named(tmp_path: Path):
    engine = fake_engine()
    engine.profile = Profile(tmp_path, 3)
    engine.submit(request("r", 3, 8))
    launched_at_end = None
    while engine.has_work:
        engine.step()
        if engine.profile.left == 0 and launched_at_end is None:
            launched_at_end = engine.steps
    assert launched_at_end in (3, 4), "the third launch's results are part of it"
    (trace,) = tmp_path.rglob("*.trace.json.gz")
    text = gzip.decompress(trace.read_bytes()).decode()
    for phase in ("plan", "dispatch", "collect", "commit"):
        assert f"onechip.{phase}" in text


def test_an_engine_that_stops_early_writes_what_it_has(tmp_path: Path):
    engine = fake_engine()
    engine.profile = Profile(tmp_path, 1000)
    engine.submit(request("r", 3, 2))
    assert gather(run_until_idle(engine))["r"].finish == "length"
    engine.close()
    assert list(tmp_path.rglob("*.trace.json.gz"))
