"""Write configs/schema.json, by which editors check and complete configs: .venv/bin/python tools/make_schema.py"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.config.describe import json_schema

SCHEMA = Path(__file__).parents[1] / "configs" / "schema.json"


def main() -> int:
    """Write the file."""
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
