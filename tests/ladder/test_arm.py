"""Arm files: everything shipped reads, every mistake names file, key and remedy, settings reach their places."""

import re
import signal
import tomllib
from pathlib import Path

import pytest

from onechip.errors import ConfigError
from onechip.ladder import arm

MINIMAL = """
schema = 1
about = "a test"
[server]
url = "http://127.0.0.1:${port}/"
[settings]
port = "8123"
flags = ""
[start]
command = ["serve", "--port", "${port}", "${flags}"]
"""


def written(folder: Path, text: str) -> str:
    path = folder / "test.toml"
    path.write_text(text)
    return str(path)


def dummies(name: str) -> dict[str, str]:
    """A value for each required setting of a shipped arm."""
    table = tomllib.loads((arm.SHIPPED / f"{name}.toml").read_text())
    values = {key: f"/some/{key}" for key in table.get("required", {})}
    return values | ({"url": "http://host:1"} if "url" in values else {})


def test_the_servers_of_the_comparison_are_shipped():
    assert set(arm.shipped()) >= {
        "onechip-bf16", "onechip-int8", "vllm-tpu", "vllm-gpu", "sglang-jax", "pure-jax", "rust-pjrt", "torchtpu",
        "llamacpp", "llamacpp-pypi", "url",
    }  # fmt: skip


@pytest.mark.parametrize("name", arm.shipped())
def test_a_shipped_arm_reads_and_says_what_was_never_tried(name: str):
    found = arm.load(name, dummies(name))
    assert re.search(r"run|tried|runs", found.about)
    assert "$" not in "".join(found.start.command if found.start else ())
    if found.start is not None:
        assert found.needs
        assert any(found.settings["port"] in word for word in found.start.command)
        assert found.settings["port"] in found.url
        assert found.commands
    if found.start and found.start.command[0] == "docker":
        # A container lives outside the process group, so it must be removed by name and forwarded no secret by value.
        assert found.stop.command[:2] == ("docker", "rm")
        assert (
            found.stop.command[-1] == found.start.command[found.start.command.index("--name") + 1]
        )
        assert "HF_TOKEN" in found.start.command


@pytest.mark.parametrize("name", [each for each in arm.shipped() if dummies(each)])
def test_a_required_setting_is_asked_for(name: str):
    with pytest.raises(ConfigError, match=rf"{name}.toml.*is needed; give --set \w+="):
        arm.load(name, {})


def test_defaults_and_substitutions(tmp_path: Path):
    found = arm.load(written(tmp_path, MINIMAL))
    assert found.start is not None
    assert (found.name, found.url, found.health, found.model) == (
        "test",
        "http://127.0.0.1:8123",
        "/health",
        "",
    )
    assert found.start.command == ("serve", "--port", "8123")
    assert (found.start.ready_s, found.stop.signal, found.stop.grace_s) == (900, signal.SIGTERM, 30)


def test_a_setting_replaces_its_default_everywhere(tmp_path: Path):
    found = arm.load(
        written(tmp_path, MINIMAL), {"port": "9", "flags": "--name 'two words' --cost $5"}
    )
    assert found.start is not None
    assert found.start.command == ("serve", "--port", "9", "--name", "two words", "--cost", "$5")
    assert found.url == "http://127.0.0.1:9"


def test_a_free_port_is_picked_once(tmp_path: Path):
    found = arm.load(written(tmp_path, MINIMAL), {"port": "free"})
    assert found.start is not None
    assert int(found.settings["port"]) > 1023
    assert found.start.command[2] == found.settings["port"]
    assert found.url.endswith(found.settings["port"])


def test_settings_may_use_each_other_and_dollars_can_be_written(tmp_path: Path):
    text = MINIMAL.replace('flags = ""', 'flags = ""\nname = "box-${port}"')
    text = (
        text.replace('"${flags}"', '"${name}", "$$5", "{{.Digest}}"')
        + '[record.commands]\nd = ["x", "{{.A}}"]\n'
    )
    found = arm.load(written(tmp_path, text))
    assert found.start is not None
    assert found.start.command[3:] == ("box-8123", "$5", "{{.Digest}}")
    assert found.commands == {"d": ("x", "{{.A}}")}


def test_request_fields_keep_their_types(tmp_path: Path):
    text = MINIMAL.replace(
        "[settings]", 'request = { cache_prompt = false, n = 3, s = "${port}" }\n[settings]'
    )
    assert arm.load(written(tmp_path, text)).request == {"cache_prompt": False, "n": 3, "s": "8123"}


def test_an_arm_without_a_start_is_somebody_elses():
    found = arm.load("url", {"url": "http://host:8000/v1/", "model": "m"})
    assert found.start is None
    assert (found.url, found.model) == ("http://host:8000/v1", "m")


MISTAKES = [
    ("schema = 1", "schema = 2", r"schema is 2; this version reads schema = 1"),
    ('about = "a test"', "", r"about is missing; give a string"),
    ('about = "a test"', "about = 3", r"about is 3; give a string"),
    (
        'about = "a test"',
        'abuot = "a test"',
        r"abuot is not known; the file may have about, .*start",
    ),
    (
        "command =",
        "comand =",
        r"start.comand is not known; start may have command, environment, ready_s",
    ),
    (
        'command = ["serve", "--port", "${port}", "${flags}"]',
        "",
        r"start.command is missing; give a list of strings",
    ),
    (
        '["serve", "--port", "${port}", "${flags}"]',
        '"serve"',
        r"start.command is 'serve'; give a list of strings",
    ),
    (
        '["serve", "--port", "${port}", "${flags}"]',
        "[]",
        r"start.command is \[\]; give a list of strings, at least 1",
    ),
    ('"--port", "${port}"', '"--port", 1', r"start.command is .*; give a list of strings"),
    (
        "${port}/",
        "${prot}/",
        r"server.url 'http://127.0.0.1:\$\{prot\}/'.*declare it, or write \$\$",
    ),
    ("${port}/", "$/", r"server.url .*write \$\$"),
    ("[start]", "[start]\nready_s = -1", r"start.ready_s is -1; give a number of seconds above 0"),
    ("[start]", "[start]\nready_s = true", r"start.ready_s is True"),
    ("[start]", '[stop]\nsignal = "STOP"\n[start]', r"stop.signal is 'STOP'; give TERM, INT"),
    ("[start]", '[start]\nenvironment = "A=1"', r"start.environment is 'A=1'; give a table"),
    ("[start]", "[start]\nenvironment = { A = 1 }", r"start.environment.A is 1; give a string"),
    ("[start]", "[start", r"not TOML"),
    ('url = "http://127.0.0.1:${port}/"', "", r"server.url is missing; give a string"),
]


@pytest.mark.parametrize(
    ("old", "new", "complaint"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))]
)
def test_a_mistake_names_file_key_and_remedy(tmp_path: Path, old: str, new: str, complaint: str):
    assert old in MINIMAL
    with pytest.raises(ConfigError, match=rf"test\.toml: {complaint}"):
        arm.load(written(tmp_path, MINIMAL.replace(old, new)))


def test_an_unknown_setting_and_an_unknown_arm_list_what_is_known(tmp_path: Path):
    with pytest.raises(ConfigError, match="no setting 'prot'; --set takes flags, port"):
        arm.load(written(tmp_path, MINIMAL), {"prot": "1"})
    with pytest.raises(ConfigError, match=r"no arm 'vlm'.*onechip-bf16, .*vllm-tpu"):
        arm.load("vlm")
    with pytest.raises(ConfigError, match=r"no arm './none\.toml'"):
        arm.load("./none.toml")
