"""configs/schema.json, by which editors check configs."""

import json
from pathlib import Path

import jsonschema
import yaml

from megappo.config.describe import keys
from megappo_tools.make_schema import json_schema

CONFIGS = Path(__file__).parents[2] / "configs"
SCHEMA = json.loads((CONFIGS / "schema.json").read_text())


def test_the_file_is_the_schema_of_the_configs_types():
    assert json_schema() == SCHEMA, "run .venv/bin/python tools/make_schema.py"


def test_shipped_configs_name_the_schema_and_fit_it():
    for path in CONFIGS.glob("*.yaml"):
        text = path.read_text()
        assert text.startswith("# yaml-language-server: $schema=schema.json\n"), path
        jsonschema.validate(yaml.safe_load(text), SCHEMA)


def test_an_editor_sees_what_loading_refuses_and_no_more():
    check = jsonschema.Draft202012Validator(SCHEMA)
    right = "{base: a.yaml, placement: {'actor, critic': 0, rollout: '1-3'}, actor: {optim: {lr: 1e-6}}}"
    assert [error.message for error in check.iter_errors(yaml.safe_load(right))] == []
    for wrong in ("{actor: {optm: {}}}", "{rollout: {temperature: warm}}", "{trainer: {resume: maybe}}"):
        assert not check.is_valid(yaml.safe_load(wrong)), wrong


def test_every_key_has_its_meaning_there():
    sections = [SCHEMA, *SCHEMA["$defs"].values()]
    described = {one.get("description") for section in sections for one in section["properties"].values()}
    assert {key.meaning for key in keys()} <= described
