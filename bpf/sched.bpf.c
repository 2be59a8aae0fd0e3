// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The scheduler: for the target's threads and those that displace them, or for every thread of the machine. */

static INLINE bool everyone(void)
{
	struct settings *s = settings();

	return s && s->everyone;
}

TRACEPOINT(sched, sched_switch)
{
	u32 prev = FIELD(ctx, sched_switch, prev_pid, s32), next = FIELD(ctx, sched_switch, next_pid, s32);
	bool prev_traced = map_lookup(MAP(threads), &prev) != 0;
	RECORD(rec_sched_switch, r);

	if (!prev_traced && !map_lookup(MAP(threads), &next) && !everyone())
		return 0;
	if (!reserve(r, KIND_SCHED_SWITCH, ENGINE_KERNEL))
		return 0;
	r->prev_tid = prev;
	r->next_tid = next;
	r->prev_state = FIELD(ctx, sched_switch, prev_state, long);
	r->prev_prio = FIELD(ctx, sched_switch, prev_prio, s32);
	r->next_prio = FIELD(ctx, sched_switch, next_prio, s32);
	r->comm_of_next = prev_traced; /* the target's threads have known names: record the other's */
	r->pad = 0;
	if (prev_traced)
		bpf_probe_read_kernel(r->comm, sizeof(r->comm), FIELD_AT(ctx, sched_switch, next_comm));
	else
		bpf_probe_read_kernel(r->comm, sizeof(r->comm), FIELD_AT(ctx, sched_switch, prev_comm));
	submit(ctx, r);
	return 0;
}

/* The CPU of a thread. Linux 5.16: bcf9033e5449 "sched: move CPU field back into thread_info if THREAD_INFO_IN_TASK=y" */
static INLINE u32 cpu_of(void *task)
{
	if (HAS_FIELD(task_struct, cpu))
		return KERNEL_READ(task_struct, cpu, task, u32);
	if (HAS_FIELD(thread_info, cpu))
		return KERNEL_READ(thread_info, cpu, KERNEL_AT(task_struct, thread_info, task), u32);
	return 0;
}

/* What the running thread does. The kernel has a number below 0 for a thread that entered it without a system call. */
static INLINE u32 what_runs(void)
{
	s64 call;

	if (!HAS_CURRENT_REGS)
		return WAKER_UNKNOWN;
	call = CURRENT_SYSCALL();
	return call < 0 ? WAKER_INTERRUPTED : WAKER_CALLED;
}

static INLINE int woken(void *ctx, u16 kind)
{
	void *task = (void *)RAW_ARG(ctx, 0);
	u32 woken = KERNEL_READ(task_struct, pid, task, s32);
	RECORD(rec_sched_waking, r);

	if (!map_lookup(MAP(threads), &woken) && !everyone())
		return 0;
	if (!reserve(r, kind, ENGINE_KERNEL))
		return 0;
	r->woken_tid = woken;
	r->target_cpu = cpu_of(task);
	r->prio = KERNEL_READ(task_struct, prio, task, s32);
	r->waker = kind == KIND_SCHED_WAKING ? what_runs() : WAKER_UNKNOWN;
	bpf_probe_read_kernel(r->comm, sizeof(r->comm), KERNEL_AT(task_struct, comm, task));
	submit(ctx, r);
	return 0;
}

RAW_TRACEPOINT(sched_waking)
{
	return woken(ctx, KIND_SCHED_WAKING);
}

RAW_TRACEPOINT(sched_wakeup)
{
	return woken(ctx, KIND_SCHED_WAKEUP);
}
