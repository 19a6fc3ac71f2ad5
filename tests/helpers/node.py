"""The explorer's module in node: `evaluate` runs an expression on it, and skips the test if there is no node."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from helpers.root import ROOT

EXPLORER = ROOT / "docs" / "explorer" / "explorer.js"
PATIENCE = 300  # seconds; a busy machine needs many times the second that it takes

# JSON has no infinity, so that it travels as the text "inf" in both directions.
_PROGRAM = """
import { readFileSync } from "node:fs";
const explorer = await import(process.argv[1]);
const data = JSON.parse(readFileSync(0, "utf8"), (key, value) => (value === "inf" ? Infinity : value));
const found = await (EXPRESSION);
const text = JSON.stringify(found, (key, value) => (value === Infinity ? "inf" : value));
process.stdout.write(text ?? "null");
"""


def evaluate(expression: str, data: Any = None) -> Any:
    """Return the value of a JavaScript expression, in which `explorer` is the module and `data` what was given."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here; on Debian: apt-get install nodejs")
    command = [node, "--input-type=module", "--eval", _PROGRAM.replace("EXPRESSION", expression), EXPLORER.as_uri()]
    given = json.dumps(data)
    done = subprocess.run(command, input=given, capture_output=True, encoding="utf-8", timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
