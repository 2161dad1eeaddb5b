"""The published schema is the code's, and real records fit it."""

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from tests.ladder.stub import stub
from tests.ladder.test_sweep import SMALL, swept

from onechip.ladder import record

SCHEMA = Path(__file__).parents[2] / "docs" / "record.schema.json"


def test_the_published_schema_is_the_codes():
    """After a change: python -m tests.ladder.test_record"""
    assert json.loads(SCHEMA.read_bytes()) == json.loads(record.json_schema())


def test_a_real_record_fits_the_schema_and_a_broken_one_does_not(tmp_path: Path):
    with stub() as url:
        swept(url, tmp_path / "r.json", SMALL)
    found = json.loads((tmp_path / "r.json").read_bytes())
    jsonschema.validate(found, json.loads(SCHEMA.read_bytes()))
    found["cells"][0]["status"] = "fine"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, json.loads(SCHEMA.read_bytes()))


def test_a_file_has_one_line_an_entry(tmp_path: Path):
    with stub() as url:
        made = swept(url, tmp_path / "r.json", SMALL)
    lines = (tmp_path / "r.json").read_text().splitlines()
    assert sum('"type":"cell"' in line for line in lines) == len(made.cells) == 2
    assert record.parse(record.dump(made), "x") == made
    assert msgspec.json.decode(record.dump(made))["schema_version"] == record.SCHEMA_VERSION


if __name__ == "__main__":
    SCHEMA.write_bytes(record.json_schema())
