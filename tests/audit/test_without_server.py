"""The audit runs where the server cannot: on a machine with torch and transformers, and no web framework."""

from __future__ import annotations

import json
import subprocess
import sys

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "httpx", "llguidance"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from ddtree.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_audit_needs_no_web_framework():
    argv = ["audit", "hybrid-tiny", "--device", "cpu", "--dtype", "float32", "--budgets", "0,4", "--max-tokens", "2"]
    command = [sys.executable, "-c", WITHOUT, *argv, "--limit", "1", "--no-reference", "--no-inspect"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["verdict"] == "identical"
