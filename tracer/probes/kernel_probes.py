"""Probes on kernel events: tracepoints and software events, by level, and their substitutes on kernels that lack them."""

from collections.abc import Callable
from pathlib import Path

from tracer.probes.driver_events import DRIVER_PROBES
from tracer.probes.tracefs import has_tracepoint

SOFTWARE = "software"  # the category of perf's software events; all others are tracepoint categories
FAULT_ENDS = {"major_faults": 6, "minor_faults": 5}  # program → PERF_COUNT_SW_PAGE_FAULTS_MAJ and _MIN
FAULT_BEGINS = "mm_filemap_fault"
READ_CALLS = ("read", "pread64", "readv", "preadv", "preadv2")
KERNEL_PROBES = (
    ("sched_process_fork", "process", "sched"),
    ("sched_process_exit", "process", "sched"),
    ("sched_process_free", "process", "sched"),
    ("sched_process_exec", "process", "sched"),
    ("sys_enter_openat", "process", "syscalls"),
    ("sched_switch", "sched", "sched"),
    ("sched_waking", "sched", "sched"),
    ("sched_wakeup", "sched", "sched"),
    *((f"sys_{edge}_{call}", "io", "syscalls") for call in READ_CALLS for edge in ("enter", "exit")),
    ("sys_enter_mmap", "io", "syscalls"),
    (FAULT_BEGINS, "io", "filemap"),
    ("mm_filemap_map_pages", "io", "filemap"),
    ("mm_filemap_add_to_page_cache", "io", "filemap"),
    ("block_io_start", "io", "block"),
    ("block_rq_issue", "io", "block"),
    ("block_rq_complete", "io", "block"),
    *((name, "io", SOFTWARE) for name in FAULT_ENDS),
    ("cpu_frequency", "heat", "power"),
    ("cpu_frequency_limits", "heat", "power"),
    ("thermal_temperature", "heat", "thermal"),
    ("cdev_update", "heat", "thermal"),
    *DRIVER_PROBES,
)
IN_INTERRUPTS = ("sched_process_free", "sched_waking", "sched_wakeup", "block_rq_complete")
"""Raw programs: the kernel drops a perf tracepoint's event in an interrupt that hit another BPF program on its CPU."""
ALWAYS = ("process", "heat")
"""Levels that are always on: the first is required, and the second records where its events exist."""
TOLD_OF = {"power": "devices/system/cpu/cpufreq/policy*", "thermal": "class/thermal/*"}
"""Categories of level heat → what must exist below sysfs; otherwise their events never fire."""
SINGLE_CALLS, EVERY_CALL = "syscalls", "raw_syscalls"
# Substitutes for the tracepoints of single system calls on kernels without CONFIG_FTRACE_SYSCALLS: every call of every process
# passes these two, 0.16 µs and 0.28 µs for both where it was measured. They have no other requirements than tracepoints have.
STAND_INS = (("sys_enter", "process", EVERY_CALL), ("sys_exit", "io", EVERY_CALL))


def offers(category: str, name: str) -> bool:
    """Whether this kernel has a tracepoint, and hardware that fires it."""
    return has_tracepoint(category, name) and (category not in TOLD_OF or any(Path("/sys").glob(TOLD_OF[category])))


def kernel_probes(levels: set[str], has: Callable[[str, str], bool] = offers) -> list[tuple[str, str, str]]:
    """(program, level, category) of the kernel-event probes of these levels that a kernel offers, by `has(category, name)`."""
    single = any(has(category, name) for name, _, category in KERNEL_PROBES if category == SINGLE_CALLS)
    return [
        (name, level, category)
        for name, level, category in (*KERNEL_PROBES, *(() if single else STAND_INS))
        if level in (*levels, *ALWAYS) and (category == SOFTWARE or has(category, name))
    ]


def lacking(levels: set[str], offered: list[tuple[str, str, str]]) -> list[str]:
    """A line for each tracepoint of these levels that is not among the offered ones."""
    categories = {category for _, _, category in offered}
    return [
        f"this kernel has no tracepoint {category}:{name}; level {level} is recorded without it"
        for name, level, category in KERNEL_PROBES
        if level in (*levels, "process")
        and (name, level, category) not in (*offered, *DRIVER_PROBES)
        and not (category == SINGLE_CALLS and EVERY_CALL in categories)
    ]
