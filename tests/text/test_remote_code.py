"""A checkpoint that brings code: it is not run, and nobody is asked whether it may."""

import json
import shutil
from pathlib import Path

import pytest

from ddtree.text import Tokenizer

SHIPPED = Path(__file__).resolve().parents[2] / "ddtree" / "embedded" / "hybrid-tiny"


def test_a_tokenizer_with_code_of_its_own_is_refused_and_not_run(tmp_path, monkeypatch):
    folder, marker = tmp_path / "model", tmp_path / "was-run"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        Tokenizer.load(folder)
    assert not marker.exists()
