"""Handles of before a fork mean the same in the child, until it runs another program."""

from pathlib import Path

from analyzer.tables.store import build_tables
from tracer.recording.format import Recording
from workloads.recordings import Writer

PARENT, CHILD, GRANDCHILD, OTHER = 400, 410, 420, 430
GRAPH, SESSION = 3, 0x5500


def test_names_of_graphs_and_models_are_inherited_by_forks_and_lost_by_other_programs(tmp_path: Path) -> None:
    w, asked = Writer(), []

    def use(at: int, pid: int) -> None:
        w.add("qnn_execute_begin", engine=3, ts=at, pid=pid, tid=pid, graph=GRAPH)
        w.add("qnn_execute_end", engine=3, ts=at + 1, pid=pid, tid=pid, graph=GRAPH)
        w.add("graph_begin", engine=4, ts=at + 2, pid=pid, tid=pid, handle=SESSION)
        w.add("graph_end", engine=4, ts=at + 3, pid=pid, tid=pid, handle=SESSION)
        asked.append(pid)

    def make(at: int, pid: int, name: bytes) -> None:
        w.add("qnn_object", engine=3, ts=at, pid=pid, tid=pid, call=15, handle=GRAPH, name=name)
        w.add("session", engine=4, ts=at, pid=pid, tid=pid, handle=SESSION, name=name)

    def fork(at: int, pid: int, child: int) -> None:
        w.add("task_fork", engine=0, ts=at, pid=pid, tid=pid, parent_tid=pid, child_tid=child)

    fork(5, PARENT, 401)  # a thread
    make(10, PARENT, b"first")
    fork(20, PARENT, CHILD)
    make(30, PARENT, b"second")
    use(40, PARENT)
    use(50, CHILD)
    fork(60, CHILD, GRANDCHILD)
    make(70, CHILD, b"own")
    use(80, CHILD)
    use(90, GRANDCHILD)
    fork(100, PARENT, OTHER)
    w.add("task_exec", engine=0, ts=110, pid=OTHER, tid=OTHER)
    use(120, OTHER)
    make(130, OTHER, b"other")
    use(140, OTHER)
    names = ["second", "first", "own", "first", "", "other"]
    tables = build_tables(Recording(w.write(tmp_path / "run")))
    assert tables["qnn_executes"][["pid", "graph_name"]].values.tolist() == [list(row) for row in zip(asked, names, strict=True)]
    assert tables["graphs"][["pid", "name"]].values.tolist() == [list(row) for row in zip(asked, names, strict=True)]
