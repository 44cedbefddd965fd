"""Write configs/schema.json, by which editors check and complete configs: .venv/bin/python tools/make_schema.py"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.config.schema import Config

SCHEMA = Path(__file__).parents[1] / "configs" / "schema.json"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a YAML config, for editors: every key, and the short forms that loading accepts."""
    schema = Config.model_json_schema()
    paths = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    schema["properties"]["base"] = paths | {
        "description": "YAML files, relative to this one, whose keys are taken over"
    }
    placement = schema["$defs"]["Placement"]
    placement["additionalProperties"] = {"type": ["string", "integer"], "description": "ranks of several components"}
    for model in (schema, *schema["$defs"].values()):
        model.pop("required", None)  # a base may set it
        for name, value in model["properties"].items():
            model["properties"][name] = _with_short_forms(value, is_ranks=model is placement)
    return schema


def _with_short_forms(schema: dict[str, Any], *, is_ranks: bool) -> dict[str, Any]:
    """Allow a text for a list of one, 1e-6 as YAML 1.1 reads it, and a number for a list of ranks."""
    kinds = schema.get("anyOf", [schema])
    further = [kind["items"] for kind in kinds if kind.get("items", {}).get("type") == "string"]
    if any(kind.get("type") == "number" for kind in kinds):
        further.append({"type": "string", "pattern": "^[-+]?[0-9.]+e[-+]?[0-9]+$"})
    if is_ranks:
        further.append({"type": "integer"})
    if not further:
        return schema
    notes = {name: schema[name] for name in ("description", "default", "title") if name in schema}
    plain = [{name: value for name, value in kind.items() if name not in notes} for kind in kinds]
    return notes | {"anyOf": [*plain, *further]}


def main() -> int:
    """Write the file."""
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
