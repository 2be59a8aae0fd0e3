"""Probes on kernel events: tracepoints and software events, by level, and their substitutes on kernels that lack them."""

from tracer.probes.driver_events import DRIVER_PROBES

SOFTWARE = "software"  # the category of perf's software events; all others are tracepoint categories
FAULT_ENDS = {"major_faults": 6, "minor_faults": 5}  # program → PERF_COUNT_SW_PAGE_FAULTS_MAJ and _MIN
FAULT_BEGINS = "mm_filemap_fault"
READ_CALLS = ("read", "pread64", "readv", "preadv", "preadv2")
WRITE_CALLS = ("write", "writev", "sendto")
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
    *((f"sys_enter_{call}", "io", "syscalls") for call in WRITE_CALLS),
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
ALWAYS = ("process", "heat")
"""Levels that are always on: the first is required, and the second records where its events exist."""
EVERY_CALL = "raw_syscalls"
# Substitutes for the tracepoints of single system calls on kernels without CONFIG_FTRACE_SYSCALLS: every call of every process
# passes these two, 0.16 µs and 0.28 µs for both where it was measured. They have no other requirements than tracepoints have.
STAND_INS = (("sys_enter", "process", EVERY_CALL), ("sys_exit", "io", EVERY_CALL))
