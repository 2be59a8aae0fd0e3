"""Slots, arguments and structs of Qualcomm's interfaces are those of its public headers, which lie in folders of SDK_INCLUDES."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tracer.engines import Engine, Probe, all_engines

FOLDERS = [Path(folder) for folder in os.environ.get("SDK_INCLUDES", "").split(":") if folder]
"""`include` folders of SDKs, each with QNN/, QAIRT/ or Genie/, or QNN's headers themselves."""
MEMBERS = {
    **{"backend_create": "backendCreate ppp", "backend_free": "backendFree p"},
    **{"context_create": "contextCreate pppp", "context_free": "contextFree pp", "context_get_binary": "contextGetBinary pp8p"},
    **{"context_from_binary": "contextCreateFromBinary pppp8pp", "context_list": "contextCreateFromBinaryListAsync ppppp"},
    **{"context_with_signal": "contextCreateFromBinaryWithSignal pppp8ppp", "apply_section": "contextApplyBinarySection pp4ppp"},
    **{"with_callback": "contextCreateFromBinaryWithCallback ppppp8ppp"},
    **{"graph_create": "graphCreate pppp", "graph_finalize": "graphFinalize ppp", "graph_retrieve": "graphRetrieve ppp"},
    **{"execute": "graphExecute pp4p4pp", "execute_async": "graphExecuteAsync pp4p4pppp"},
    **{"profile_create": "profileCreate p4p", "profile_free": "profileFree p", "profile_set_config": "profileSetConfig pp"},
    **{"get_events": "profileGetEvents ppp", "get_sub_events": "profileGetSubEvents 8pp"},
    **{"event_data": "profileGetEventData 8p", "extended_event_data": "profileGetExtendedEventData 8p"},
    **{"mem_register": "memRegister pp4p", "mem_deregister": "memDeRegister p4"},
    **{"device_create": "deviceCreate ppp", "device_free": "deviceFree p"},
}
"""Program of engine qnn → the member of its slot, and its arguments: p a pointer, else an integer's bytes."""
QAIRT_MEMBERS = {
    **{"context_create": "create pppp", "context_free": "free pp", "qairt_get_binary": "getBinary ppp"},
    **{
        "qairt_from_binary": "createFromBinary ppppppp",
        "graph_create": "createGraph pppp",
        "graph_retrieve": "retrieveGraph ppp",
    },
    **{"apply_section": "applyBinarySection pp4ppp", "graph_finalize": "finalize ppp"},
    **{"execute": "execute pp4p4pp", "execute_async": "executeAsync pp4p4pppp"},
    **{"backend_create": "create ppp", "backend_free": "free p", "profile_create": "createProfile p4p", "profile_free": "free p"},
}
GENIE_ARGUMENTS = {
    **{"query": "pp4pp", "tokenQuery": "pp44pp", "embeddingQuery": "pp44ppp", "embeddingTokenQuery": "pp44ppp", "create": "pp"},
    **{
        "execute": "pp",
        "generate": "pppp",
        "free": "p",
        "reset": "p",
        "applyLora": "ppp",
        "setData": "p4p8p",
        "getJsonData": "ppp",
    },
}
EVENT = ("type", "unit", "value", "identifier")
STRUCTS = {
    "event_data": ("QnnProfile_EventData_t", {name: name for name in EVENT}),
    "extended_event_data": (
        "QnnProfile_ExtendedEventData_t",
        {
            **{"version": "version", "type": "v1.type", "unit": "v1.unit", "dtype": "v1.value.dataType"},
            **{"value": "v1.value.uint64Value", "timestamp": "v1.timestamp", "identifier": "v1.identifier"},
        },
    ),
    "memory_descriptor": (
        "Qnn_MemDescriptor_t",
        {
            **{"n_dims": "memShape.numDim", "dims": "memShape.dimSize", "shape_config": "memShape.shapeConfig"},
            **{"dtype": "dataType", "type": "memType", "info": "ionInfo"},
        },
    ),
}
"""Struct of bpf/qnn.bpf.c → QNN's, and each field's member."""
ASK = """
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <type_traits>
typedef uint64_t u64;
typedef uint32_t u32;
template <class R, class... A> void arguments(R (*)(A...)) {
	const char *shown[] = {(std::is_pointer<A>::value ? "p" : sizeof(A) == 8 ? "8" : "4")...};
	for (auto each : shown) printf("%s", each);
	printf(" ");
}
"""

pytestmark = [
    pytest.mark.skipif(not FOLDERS, reason="needs SDK_INCLUDES: folders of public headers of QNN, QAIRT or Genie"),
    pytest.mark.parametrize("folder", FOLDERS, ids=str),
]


def answers(tmp_path: Path, folder: Path, headers: list[str], body: list[str]) -> list[str]:
    """What a program that includes these headers prints, as words."""
    found = [next(folder.glob(f"**/{header}"), None) for header in headers]
    if not all(found):
        pytest.skip(f"{folder} has no {headers[found.index(None)]}")
    roots = {str(path) for each in found if each for path in (each.parent, each.parent.parent)}
    source = (
        ASK + "".join(f'#include "{path}"\n' for path in found) + bpf_structs() + "int main() {\n" + "\n".join(body) + "\n}\n"
    )
    (tmp_path / "ask.cpp").write_text(source)
    include = [f"-I{path}" for path in sorted(roots)]
    subprocess.run(["c++", "-w", "-std=c++17", *include, str(tmp_path / "ask.cpp"), "-o", str(tmp_path / "ask")], check=True)
    return subprocess.run([str(tmp_path / "ask")], capture_output=True, text=True, check=True).stdout.split()


def bpf_structs() -> str:
    """The definitions of the structs that the BPF programs read."""
    text = (ROOT / "bpf" / "qnn.bpf.c").read_text()
    return "".join(match[0] for name in STRUCTS if (match := re.search(rf"^struct {name} {{.*?^}};\n", text, re.S | re.M)))


def stem(probe: Probe) -> str:
    """Its program without the engine's name and the end that it stands at."""
    return re.sub("^qnn_|_(begin|end)$", "", probe.program)


def number(expression: str) -> str:
    return f'printf("%zu ", (size_t)({expression}));'


def api_version(tmp_path: Path, folder: Path) -> tuple[int, int]:
    """Major and minor version of QNN's core API."""
    asked = [number(f"QNN_API_VERSION_{part}") for part in ("MAJOR", "MINOR")]
    major, minor = map(int, answers(tmp_path, folder, ["QnnInterface.h"], asked))
    return major, minor


def slots_since(engine: Engine, minor: int) -> dict[str, int]:
    """Program → slot in a table of this API version, as the recorder counts them."""
    lacks = [] if minor >= engine.same_since else engine.older_lack[str(minor)]
    there = [probe for probe in engine.probes if probe.slot >= 0 and probe.slot not in lacks and probe.since <= minor]
    return {stem(probe): probe.slot - sum(lack < probe.slot for lack in lacks) for probe in there}


def test_slots_and_arguments_are_those_of_qnns_table(tmp_path: Path, folder: Path) -> None:
    headers, table = ["QnnInterface.h"], "QNN_INTERFACE_VER_TYPE"
    major, minor = map(
        int, answers(tmp_path, folder, headers, [number("QNN_API_VERSION_MAJOR"), number("QNN_API_VERSION_MINOR")])
    )
    engine = all_engines()["qnn"]
    assert major == engine.api_major and minor <= engine.api_minor
    slots = slots_since(engine, minor)
    members = [MEMBERS[name].split() for name in slots]
    asked = [number("offsetof(QnnInterface_t, apiVersion)"), number("offsetof(QnnInterface_t, QNN_INTERFACE_VER_NAME)")]
    for member, _ in members:
        asked += [number(f"offsetof({table}, {member}) / sizeof(void *)"), f"arguments({table}().{member});"]
    told = answers(tmp_path, folder, headers, asked)
    expected = [word for slot, (_, arguments) in zip(slots.values(), members, strict=True) for word in (str(slot), arguments)]
    assert told == ["16", "40", *expected]


def test_functions_that_a_table_lacks_are_not_in_it(tmp_path: Path, folder: Path) -> None:
    engine, (_, minor) = all_engines()["qnn"], api_version(tmp_path, folder)
    absent = {stem(probe) for probe in engine.probes if probe.slot >= 0} - slots_since(engine, minor).keys()
    header = next(folder.glob("**/QnnInterface.h")).read_text()
    declared = set(re.findall(r"Fn_t\s+(\w+);", header))
    unread = {"memRegister"} if minor < engine.same_since else set()  # there, with another struct
    assert {MEMBERS[name].split()[0] for name in absent} & declared == unread


def test_structs_that_are_read_are_qnns(tmp_path: Path, folder: Path) -> None:
    engine, (_, minor) = all_engines()["qnn"], api_version(tmp_path, folder)
    read = STRUCTS if minor >= engine.same_since else {"event_data": STRUCTS["event_data"]}
    pairs = [
        (f"offsetof(struct {ours}, {field})", f"offsetof({theirs}, {member})")
        for ours, (theirs, fields) in read.items()
        for field, member in fields.items()
    ]
    if read is STRUCTS:
        pairs += [
            ("24", "offsetof(QnnContext_Params_t, v1.binaryBufferSize)"),
            ("8", "offsetof(QnnProfile_Config_t, numMaxEvents)"),
        ]
        pairs += [(f"sizeof(struct {ours})", f"sizeof({theirs})") for ours, (theirs, _) in read.items()]
    else:  # what has other structs there is not probed
        assert not {"mem_register", "extended_event_data"} & slots_since(engine, minor).keys()
    told = answers(tmp_path, folder, ["QnnInterface.h"], [number(each) for pair in pairs for each in pair])
    assert told[::2] == told[1::2]


@pytest.mark.parametrize("component", all_engines()["qairt"].interfaces)
def test_slots_and_arguments_are_those_of_qairts_tables(tmp_path: Path, folder: Path, component: str) -> None:
    engine, kind = all_engines()["qairt"], component.capitalize()
    table = f"Qairt{kind}_V1_t"
    slots = {stem(probe): probe.slot for probe in engine.probes if probe.table == component and probe.at == "entry"}
    members = [QAIRT_MEMBERS[name].split() for name in slots]
    asked = [number(f"QAIRT_{component.upper()}_V1_ID"), number(f"sizeof({table})")]
    for member, _ in members:
        asked += [number(f"offsetof({table}, {member}) / sizeof(void *)"), f"arguments({table}().{member});"]
    expected = [word for slot, (_, arguments) in zip(slots.values(), members, strict=True) for word in (str(slot), arguments)]
    told = answers(tmp_path, folder, [f"Qairt{kind}/Qairt{kind}.h", "QairtInterface/QairtInterface.h"], asked)
    assert told == [*map(str, engine.interfaces[component][:2]), *expected]


def test_arguments_are_those_of_genies_functions(tmp_path: Path, folder: Path) -> None:
    headers = sorted(path.name for path in folder.glob("**/Genie*.h")) or ["GenieDialog.h"]
    text = "".join(path.read_text() for path in folder.glob("**/Genie*.h"))
    symbols = {name for probe in all_engines()["genie"].probes for name in probe.symbols}
    there = [name for name in sorted(symbols) if re.search(rf"\b{name}\(", text)]
    told = answers(tmp_path, folder, headers, [f"arguments((decltype(&{name}))0);" for name in there])
    assert there and dict(zip(there, told, strict=True)) == {name: GENIE_ARGUMENTS[name.split("_")[1]] for name in there}
