"""The kernel's own probes: tracepoints and software events, by level, and those that stand in where a kernel lacks them."""

from collections.abc import Callable
from pathlib import Path

from tracer.probes.driver_events import DRIVER_PROBES
from tracer.probes.tracefs import has_tracepoint

SOFTWARE = "software"  # the category of perf's software events; every other one is a category of tracepoints
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
"""Raw programs: what perf is told, the kernel keeps from a CPU that an interrupt took from another BPF program."""
ALWAYS = ("process", "heat")
"""Levels that nobody asks for: without the first nothing goes, and the second is there where there is something to tell."""
TOLD_OF = {"power": "devices/system/cpu/cpufreq/policy*", "thermal": "class/thermal/*"}
"""Categories of level heat: what must be there below sysfs, or they never tell anything."""
SINGLE_CALLS, EVERY_CALL = "syscalls", "raw_syscalls"
# What stands in for tracepoints of single system calls in kernels without CONFIG_FTRACE_SYSCALLS: every call of every process
# passes these two, 0.16 µs and 0.28 µs for both where it was measured. They need no more than all other tracepoints do.
STAND_INS = (("sys_enter", "process", EVERY_CALL), ("sys_exit", "io", EVERY_CALL))


def offers(category: str, name: str) -> bool:
    """Whether this kernel has a tracepoint, and events for it."""
    return has_tracepoint(category, name) and (category not in TOLD_OF or any(Path("/sys").glob(TOLD_OF[category])))


def kernel_probes(levels: set[str], has: Callable[[str, str], bool] = offers) -> list[tuple[str, str, str]]:
    """(program, level, category) of the kernel's own probes that levels ask for and a kernel, by category and name, `has`."""
    single = any(has(category, name) for name, _, category in KERNEL_PROBES if category == SINGLE_CALLS)
    return [
        (name, level, category)
        for name, level, category in (*KERNEL_PROBES, *(() if single else STAND_INS))
        if level in (*levels, *ALWAYS) and (category == SOFTWARE or has(category, name))
    ]


def lacking(levels: set[str], offered: list[tuple[str, str, str]]) -> list[str]:
    """A line for each tracepoint that levels ask for and that a kernel, which offers these, lacks."""
    categories = {category for _, _, category in offered}
    return [
        f"this kernel has no tracepoint {category}:{name}; level {level} is recorded without it"
        for name, level, category in KERNEL_PROBES
        if level in (*levels, "process")
        and (name, level, category) not in (*offered, *DRIVER_PROBES)
        and not (category == SINGLE_CALLS and EVERY_CALL in categories)
    ]
