"""What the plugin needs of SGLang is looked for first; a lack is said, whole. SGLang itself is not needed here."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ddtree.sglang.hooks import REGISTRY, WORKER, Hook, missing, refusal
from ddtree.sglang.plugin import register


class FakeSGLang:
    """Modules that hold what `hooks` name, but for what is left out."""

    def __init__(self, hooks):
        self.modules = {}
        for hook in hooks:
            found = self.modules.setdefault(hook.module, SimpleNamespace())
            *outer, last = hook.name.split(".")
            for part in outer:
                found = found.__dict__.setdefault(part, SimpleNamespace())
            taken = ", ".join(hook.parameters)
            found.__dict__[last] = eval(f"lambda {taken}: None")

    def __call__(self, module):
        if module not in self.modules:
            raise ImportError(f"No module named {module!r}")
        return self.modules[module]


def test_nothing_is_missing_where_all_is_there():
    assert missing(REGISTRY + WORKER, FakeSGLang(REGISTRY + WORKER)) == []


@pytest.mark.parametrize("absent", REGISTRY + WORKER, ids=str)
def test_each_hook_is_missed_when_it_is_not_there(absent):
    hooks = REGISTRY + WORKER
    found = missing(hooks, FakeSGLang([each for each in hooks if each != absent]))
    assert len(found) == 1 and found[0].startswith(f"{absent.module}.{absent.name}")


def test_a_parameter_that_went_away_is_named():
    hook = Hook("m", "verify", ("batch", "mask"))
    assert missing([hook], FakeSGLang([Hook("m", "verify", ("batch",))])) == ["m.verify taking batch, mask: it does not take mask"]


def test_a_function_that_takes_anything_takes_ours():
    anything = SimpleNamespace(verify=lambda **more: None)
    assert missing([Hook("m", "verify", ("mask",))], lambda module: anything) == []


def test_the_refusal_lists_all_and_says_what_to_do():
    text = refusal(["a.b", "c.d taking e"])
    assert "  - a.b\n  - c.d taking e\n" in text and "pip install" in text and "DDTREE" in text


def test_another_sglang_gets_the_list_in_its_log_and_starts(monkeypatch, caplog):
    fake = ModuleType("sglang")
    monkeypatch.setitem(sys.modules, "sglang", fake)
    with caplog.at_level(logging.ERROR):
        register()
    assert "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.register" in caplog.text


def test_an_older_name_will_do():
    hook = Hook("m", "verify", ("mask",), former_name="verify_v2")
    assert missing([hook], FakeSGLang([Hook("m", "verify_v2", ("mask",))])) == []
    assert missing([hook], FakeSGLang([Hook("m", "other")])) == ["m.verify taking mask"]
