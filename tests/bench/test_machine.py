"""What else the machine did while it was timed, and that a busy one is named beside its numbers."""

from ddtree.bench.machine import Neighbours
from ddtree.bench.report import notes
from tests.bench.results import finished


def lines(user, idle):
    return f"cpu  {user} 0 0 {idle} 50 0 0 0 0 0\ncpu0 {user} 0 0 {idle} 50 0 0 0 0 0\n"


def test_cores_of_others_are_counted(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text(lines(1000, 9000))
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    clock = iter([10.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with Neighbours(stat) as neighbours:
        stat.write_text(lines(1000 + 1700, 9300))
    # 17 s of work in 10 s, of which this process did next to nothing.
    assert 1.5 < neighbours.cores <= 1.7


def test_where_the_system_does_not_tell_nothing_is_said(tmp_path):
    with Neighbours(tmp_path / "none") as neighbours:
        pass
    assert neighbours.cores is None and not any("busy" in note for note in notes(finished(other_cores=None)))


def test_a_busy_machine_is_named():
    assert any("1.7 cores busy" in note for note in notes(finished(other_cores=1.7)))
    assert not any("busy" in note for note in notes(finished(other_cores=0.05)))
