"""The commands over a scripted engine: no weights, no torch."""

import sys
from pathlib import Path
from types import SimpleNamespace

from ddtree.sources import Source
from tests.server.fakes import VOCAB, ByteTokenizer, ScriptEngine

SOURCE = Source("toy", Path("toy"), Path("toy-dflash"), "toy")


def stub_engine(script="hello", drafter=True):
    """A scripted engine with what the commands ask of a real one."""
    engine = ScriptEngine(script)
    engine.config = SimpleNamespace(max_context=512, max_tree_budget=1024)
    engine.has_drafter, engine.block_size, engine.vocab_size = drafter, 8 if drafter else None, VOCAB
    device = SimpleNamespace(type="cpu", __str__=lambda self: "cpu")
    engine.target = SimpleNamespace(device=device, model=SimpleNamespace(dtype="torch.float32"))
    return engine


def install(patch, engine, tokenizer=None, source=SOURCE):
    """Put the stubs where the commands look; `patch(object, name, value)`."""
    import ddtree.cli.chat
    import ddtree.cli.generate
    import ddtree.cli.serve

    for module in (ddtree.cli.chat, ddtree.cli.generate, ddtree.cli.serve):
        patch(module, "find", lambda args: (source, tokenizer or ByteTokenizer()))
        patch(module, "load", lambda args, source: engine)


if __name__ == "__main__":
    from ddtree.cli.main import main

    endless = "ab" * 100_000
    stub = stub_engine(endless)
    stub.config.max_context = 10**6
    install(setattr, stub)
    sys.exit(main(sys.argv[1:]))
