"""Kernels are compiled before they are launched: side by side, once each, and whatever goes wrong is the launch's to say."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from ddtree.kernels.compiling import Compilers, compile_ahead

triton = pytest.importorskip("triton")
pytest.importorskip("triton.runtime._async_compile")

CPU = torch.device("cpu")


class Machine:
    """Triton's driver and compiler of a GPU that is not there; remembers what was compiled and launched."""

    def __init__(self) -> None:
        self.compiled, self.launched, self.error, self.meeting = [], [], None, None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def compile(self, source, **_) -> SimpleNamespace:
        if self.meeting is not None:
            self.meeting.wait(timeout=30)  # until as many compilers are at work
        if self.error is not None:
            raise self.error
        self.compiled.append((source.name, threading.current_thread() is threading.main_thread()))
        launch = lambda *args: self.launched.append(source.name)  # noqa: E731
        return SimpleNamespace(run=launch, function=None, packed_metadata=None, launch_metadata=lambda *args: None)


@pytest.fixture(name="machine")
def _machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(triton.runtime.driver, "_active", machine)
    monkeypatch.setattr(triton.compiler, "compile", machine.compile)
    return machine


@pytest.fixture(name="kernels")
def _kernels() -> list:
    """Three, as `triton.jit` makes them where no interpreter is asked for."""
    from triton.runtime.jit import JITFunction

    def first(x, SIZE: triton.language.constexpr):
        pass

    def second(x, SIZE: triton.language.constexpr):
        pass

    def third(x, SIZE: triton.language.constexpr):
        pass

    return [JITFunction(function) for function in (first, second, third)]


def launch_all(kernels, sizes=(16,)):
    def rehearse() -> None:
        for size in sizes:
            for kernel in kernels:
                kernel[(1,)](torch.empty(4), SIZE=size)

    return rehearse


def test_all_kernels_of_all_rehearsals_are_compiled_at_once(machine, kernels):
    machine.meeting = threading.Barrier(6)  # broken, and nothing compiled, were one to wait for another
    assert compile_ahead([launch_all(kernels), launch_all(kernels, (16, 32))], CPU, num_threads=6) == 6
    assert len(machine.compiled) == 6 and not any(on_main for _, on_main in machine.compiled)
    assert not machine.launched


def test_a_launch_finds_what_was_compiled(machine, kernels):
    compile_ahead([launch_all(kernels)], CPU)
    launch_all(kernels)()
    assert machine.launched == ["first", "second", "third"] and len(machine.compiled) == 3
    assert compile_ahead([launch_all(kernels)], CPU) == 0  # nothing is left to compile
    launch_all(kernels, (64,))()
    assert [on_main for _, on_main in machine.compiled[3:]] == [True] * 3  # unforeseen, compiled at the launch


def test_an_error_of_the_compiler_is_raised_by_the_launch(machine, kernels):
    machine.error = RuntimeError("out of resource: shared memory")
    compile_ahead([launch_all(kernels)], CPU)
    with pytest.raises(RuntimeError, match="out of resource: shared memory"):
        launch_all(kernels)()


def test_a_kernel_that_does_not_load_is_left_to_the_launch(machine, kernels):
    class Unloadable(SimpleNamespace):
        @property
        def run(self):
            raise RuntimeError("no kernel image")

    triton.compiler.compile = lambda source, **_: Unloadable(function=None, packed_metadata=None, launch_metadata=lambda *args: None)
    compile_ahead([launch_all(kernels)], CPU)
    with pytest.raises(RuntimeError, match="no kernel image"):
        launch_all(kernels)()


def test_a_rehearsal_that_fails_stops_nothing(machine, kernels, caplog):
    def fail() -> None:
        raise IndexError("beyond the rehearsal")

    caplog.set_level("DEBUG", "ddtree")
    assert compile_ahead([launch_all(kernels), fail, launch_all(kernels, (32,))], CPU) == 3
    assert "beyond the rehearsal" in caplog.text
    launch_all(kernels, (16, 32))()
    assert len(machine.launched) == 6


def test_what_kernels_would_write_is_zero_in_a_rehearsal(machine):
    made = []
    makers = (lambda: torch.empty(999), lambda: torch.empty_like(torch.ones(999)), lambda: torch.ones(1).new_empty(999))
    compile_ahead([lambda: made.extend(make() for make in makers)], CPU)
    assert len(made) == 3 and not any(tensor.any() for tensor in made)


def test_it_says_what_takes_long(machine, kernels, caplog, monkeypatch):
    monkeypatch.setattr("ddtree.kernels.compiling.ANNOUNCED_AFTER", 0.05)
    caplog.set_level("INFO", "ddtree")
    machine.meeting = threading.Barrier(4)
    others = threading.Timer(0.5, machine.meeting.wait)
    others.start()
    compile_ahead([launch_all(kernels)], CPU, num_threads=3)
    others.join()
    assert "compiling 3 kernels on 3 threads" in caplog.text and len(machine.compiled) == 3


def test_other_threads_launch_meanwhile(machine, kernels):
    def beside() -> None:
        other = threading.Thread(target=launch_all(kernels))
        other.start()
        other.join()

    compile_ahead([beside], CPU)
    assert machine.launched == ["first", "second", "third"]


def test_of_two_that_compile_ahead_neither_launches_nor_stops_later_launches(machine, kernels):
    over = threading.Event()
    other = threading.Thread(target=lambda: compile_ahead([lambda: over.wait(30), launch_all(kernels, (32,))], CPU))

    def together() -> None:
        other.start()
        other.join(0.2)  # time for it to begin
        launch_all(kernels)()

    compile_ahead([together], CPU)
    over.set()
    other.join()
    assert len(machine.compiled) == 6 and not machine.launched
    launch_all(kernels, (16, 32))()
    assert len(machine.launched) == 6


def test_an_older_triton_compiles_at_the_launch_as_ever(machine, kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", None)
    assert compile_ahead([launch_all(kernels)], CPU) == 0
    launch_all(kernels)()
    assert machine.launched == ["first", "second", "third"]


def test_threads_compile_for_the_current_device_where_none_is_numbered(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda", "cuda:1"):
        with Compilers(torch.device(name), 1) as compilers:
            compilers.submit(lambda: SimpleNamespace(run=None)).result()
    assert chosen == [3, 1]
