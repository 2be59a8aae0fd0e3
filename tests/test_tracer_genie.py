"""Genie by a library that stands in for it: a row for every call, and the figures of its profile; nothing here saw a device."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analyzer.questions.npu_figures import npu_statistics
from analyzer.tables import store
from tests.conftest import ROOT, trace
from views.report.npu import npu_section
from views.report.sections import Run

QUERIES = 30
PROGRAM = """
import ctypes as c, json, sys
genie = c.CDLL(sys.argv[1])
said, libc = [], c.CDLL(None)
libc.malloc.restype = c.c_void_p
allocate = c.CFUNCTYPE(None, c.c_size_t, c.POINTER(c.c_void_p))(lambda size, out: out.__setitem__(0, libc.malloc(size)))
def call(name, *args):
    said.append([name, getattr(genie, name)(*args)])
handles = {}
for kind in ("Dialog", "Pipeline", "Node", "Embedding"):
    out = c.c_uint64()
    call(f"Genie{kind}_create", None, c.byref(out))
    handles[kind] = out
for name in ("Dialog_embeddingQuery", "Dialog_embeddingTokenQuery", "Dialog_batchQuery", "Dialog_tokenQuery", "Pipeline_execute",
             "Embedding_generate", "Node_setData", "Node_execute", "Node_getData", "Dialog_applyLora", "Node_applyLora",
             "Dialog_reset", "Pipeline_reset", "Node_reset"):
    call(f"Genie{name}", handles[name.split("_")[0]])
for number in range(int(sys.argv[2])):
    call("GenieDialog_query", handles["Dialog"])
    if number % 10 == 9:
        text = c.c_void_p()
        genie.GenieProfile_getJsonData(c.c_uint64(77), allocate, c.byref(text))
for kind, handle in handles.items():
    call(f"Genie{kind}_free", handle)
print(json.dumps({"said": said, "profile": json.loads(c.string_at(text.value))}))
"""
STEPS = ("query", "Query", "Pipeline_execute", "generate")


@pytest.mark.needs("probes")
def test_every_call_of_genie_has_a_row_and_its_profile_gives_times_to_first_tokens(tmp_path: Path) -> None:
    library = tmp_path / "libGenie.so"
    source = ROOT / "workloads" / "programs" / "fake_genie.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(library), str(QUERIES)]
    done = trace("run", "--no-views", "--levels", "token,graph", "-o", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    tables = store.load_tables(tmp_path / "run")
    steps = [status for name, status in told["said"] if name.endswith(STEPS)]
    calls = [(name.split("_")[1], status) for name, status in told["said"] if not name.endswith(STEPS)]
    assert tables["tokens"]["result"].tolist() == steps and len(steps) == QUERIES + 6 and 3 in steps
    named = {"applyLora": "apply_lora", "setData": "set_data", "getData": "get_data", "execute": "execute_node"}
    kinds = tables["graphs"][["kind", "status"]].values.tolist()
    assert kinds == [[named.get(kind, kind), status] for kind, status in calls] and ["apply_lora", 7] in kinds
    events, truth = tables["genie_events"], told["profile"]["components"][0]["events"]
    assert len(events) == len(truth) == QUERIES + 1 and set(events["component"]) == {"dialog0"}
    assert events["duration_us"].tolist() == [event["duration"] for event in truth]
    assert events["ttft_us"].tolist() == [event["time-to-first-token"]["value"] for event in truth]
    rates = [event["token-generation-rate"] for event in truth]
    known = [rate["value"] if rate["unit"] == "toks/sec" else np.nan for rate in rates]
    np.testing.assert_array_equal(events["generated_tokens_s"], known)
    assert np.isnan(known).sum() == 1 and events["init_us"].isna().all()
    (row,) = [row for row in npu_statistics(tables)["genie"] if row["type"] == "GenieDialog_query"]
    queries = [event for event in truth if event["type"] == "GenieDialog_query"]
    assert row["calls"] == len(queries) and row["ttft_us"] == np.median(
        [each["time-to-first-token"]["value"] for each in queries]
    )
    assert row["generated_tokens_s"] == events["generated_tokens_s"][events["type"] == "GenieDialog_query"].median()
    section = npu_section(Run({}, tables, {}))
    assert section is not None and any("genie_events" in block.get("query", "") for block in section.blocks)
