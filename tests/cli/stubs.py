"""The commands over a scripted engine: no weights, no torch."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from ddtree.sources import Source
from tests.server.fakes import VOCAB, ByteTokenizer, ScriptEngine

SOURCE = Source("toy", Path("toy"), Path("toy-dflash"), "toy")


class Cpu:
    """A device as the server reads it."""

    type = "cpu"

    def __str__(self):
        return "cpu"


class Pace:
    """A gate that lets every step through, a little later."""

    def wait(self, timeout_s):
        time.sleep(0.002)
        return True


def stub_engine(script="hello", drafter=True):
    """A scripted engine with what the commands ask of a real one."""
    engine = ScriptEngine(script)
    engine.config = SimpleNamespace(max_context=512, max_tree_budget=1024, batch_invariant=False)
    engine.has_drafter, engine.block_size, engine.vocab_size = drafter, 8 if drafter else None, VOCAB
    engine.cache_use = 0.0
    engine.target = SimpleNamespace(device=Cpu(), model=SimpleNamespace(dtype="torch.float32"))
    return engine


def install(patch, engine, tokenizer=None, source=SOURCE):
    """Put the stubs where the commands look; `patch(object, name, value)`."""
    import ddtree.cli.chat
    import ddtree.cli.generate
    import ddtree.cli.replicas
    import ddtree.cli.serve

    for module in (ddtree.cli.chat, ddtree.cli.generate, ddtree.cli.serve):
        patch(module, "find", lambda args: (source, tokenizer or ByteTokenizer()))
        patch(module, "load", lambda args, source: engine)
    patch(ddtree.cli.replicas, "PROGRAM", (sys.executable, "-m", "tests.cli.stubs"))
    patch(ddtree.cli.replicas, "resolve", lambda model, drafter: source)
    patch(ddtree.cli.serve, "check_memory", lambda args, source, say: None)
    patch(ddtree.cli.serve, "start", lambda source, engine, say: None)  # no rounds to time


if __name__ == "__main__":
    from ddtree.cli.main import main

    endless = "ab" * 100_000
    stub = stub_engine(endless)
    stub.config.max_context, stub.gate = 10**6, Pace()
    install(setattr, stub)
    sys.exit(main(sys.argv[1:]))
