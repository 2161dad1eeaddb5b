"""Two checkpoints on the same prompts: at parity with itself, and different where the weights are."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.grammar_walk import write_checkpoint
from tests.tiny_model import write_tiny

from onechip import parity
from onechip.errors import ConfigError

PROMPTS = {"short": "a b", "longer": "a bc abc"}


class FakeLLM:
    """An LLM whose logits are a function of its name and the ids, and whose greedy answer follows them."""

    def __init__(self, model: str, **config: Any):
        assert config == {"dtype": "float32"}
        self.shift = len(model)
        encode = lambda text: [self.shift_of(model) + ord(c) for c in text]  # noqa: E731
        self.tokenizer = None if model == "bare" else SimpleNamespace(bos_id=2, encode=encode)

    def shift_of(self, model: str) -> int:
        return 1 if model == "other-vocabulary" else 0

    def generate(self, prompts: Sequence[Any], params: Any) -> list[SimpleNamespace]:
        assert params.temperature == 0
        first = int(self.score(prompts[0])[-1].argmax())
        return [SimpleNamespace(token_ids=(first, *range(params.max_tokens - 1)))]

    def score(self, ids: Sequence[int]) -> np.ndarray:
        rng = np.random.default_rng([self.shift, *ids])
        return rng.normal(size=(len(ids), 300)).astype(np.float32)


@pytest.fixture
def _faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "LLM", FakeLLM)


@pytest.mark.usefixtures("_faked")
def test_the_last_position_and_the_greedy_answer_are_compared():
    same = parity.checkpoints("model", "model", max_tokens=4, prompts=PROMPTS, dtype="float32")
    assert [p.prompt for p in same] == list(PROMPTS)
    assert all(p.argmax and p.identical and p.max_diff == 0 and p.kl == 0 for p in same)
    other = parity.checkpoints("model", "second", max_tokens=4, prompts=PROMPTS, dtype="float32")
    ids = [2, *map(ord, PROMPTS["short"])]
    ref, got = (FakeLLM(name, dtype="float32").score(ids)[-1] for name in ("model", "second"))
    assert other[0].max_diff == pytest.approx(float(np.abs(ref - got).max()))
    assert not other[0].argmax and other[0].prefix == 0 and other[0].greedy == 4


@pytest.mark.usefixtures("_faked")
@pytest.mark.parametrize(
    ("got", "says"), [("bare", "no tokenizer"), ("other-vocabulary", "different token ids")]
)
def test_checkpoints_that_read_other_ids_are_refused(got: str, says: str):
    with pytest.raises(ConfigError, match=says):
        parity.checkpoints("model", got, prompts=PROMPTS, dtype="float32")


@pytest.mark.slow
def test_a_real_checkpoint_is_at_parity_with_itself_and_not_with_another(tmp_path: Path):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder, cap in zip(folders, (30.0, 20.0), strict=True):
        folder.mkdir()
        write_checkpoint(folder, final_logit_softcapping=cap)
    shape = {"page_size": 4, "chunk_size": 32, "max_model_len": 64, "max_seqs": 2}
    config = {"dtype": "float32", "random_weights": True, **shape}
    prompt = {"one": "a b c"}
    for folder in folders:
        (found,) = parity.checkpoints(
            str(folders[0]), str(folder), max_tokens=3, prompts=prompt, **config
        )
        assert (found.max_diff == 0 and found.identical) == (folder == folders[0])


def test_a_directory_without_a_tokenizer_cannot_be_compared(tmp_path: Path):
    config = {"random_weights": True, "dtype": "float32", "max_model_len": 64, "max_seqs": 2}
    with pytest.raises(ConfigError, match="no tokenizer"):
        parity.compute(write_tiny(tmp_path), PROMPTS, 4, config)
