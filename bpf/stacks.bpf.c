// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Stacks: which samples of the CPUs' clocks are kept, and copies of the stacks of threads that wait long and of those that wake them.
 * A thread's stack can only be read while it runs: it is copied when the thread goes to sleep, and sent if that took long.
 */

static INLINE struct stack_copy *slot_of(u32 tid)
{
	u32 slot = tid & (STACK_SLOTS - 1);

	return map_lookup(MAP(stack_copies), &slot);
}

/* The running thread's calls whose return is probed. */
static INLINE u64 note_calls(struct stack_copy *s)
{
	void *task = KERNEL_READ(task_struct, utask, (void *)bpf_get_current_task(), void *);
	void *call = task ? KERNEL_READ(uprobe_task, return_instances, task, void *) : 0;
	u64 count = 0;

	for (int i = 0; i < PROBED_CALLS; i++) {
		s->calls[i].stack = call ? KERNEL_READ(return_instance, stack, call, u64) : 0;
		s->calls[i].address = call ? KERNEL_READ(return_instance, orig_ret_vaddr, call, u64) : 0;
		count += call != 0;
		call = call ? KERNEL_READ(return_instance, next, call, void *) : 0;
	}
	return count;
}

/* Whether the kernel keeps this sample: that of a thread of the target. */
PERF_EVENT(stack_sample)
{
	struct stack_copy *s = traced() ? slot_of((u32)bpf_get_current_pid_tgid()) : 0;

	if (s && note_calls(s)) {
		s->of = bpf_get_current_pid_tgid();
		s->reason = STACK_RETURNS;
		s->bytes = 0;
		bpf_perf_event_output(ctx, MAP(stacks), BPF_F_CURRENT_CPU, s, sizeof(*s) - sizeof(s->stack));
		s->of = 0;
	}
	return traced() != 0;
}

#if defined(LOADER_BCC)
#define USER_REGISTERS() ((void *)0)
#else
#define USER_REGISTERS() ((void *)bpf_task_pt_regs(bpf_get_current_task_btf()))
#endif

/* Registers and stack of the running thread. A page that is not in memory ends the copy. */
static INLINE struct stack_copy *copied(u32 reason, u32 tid, u64 since)
{
	struct stack_copy *s = slot_of((u32)bpf_get_current_pid_tgid());
	u64 at, done = 0, part;

	if (!s)
		return 0;
	s->of = bpf_get_current_pid_tgid();
	s->reason = reason;
	s->tid = tid;
	s->since = since;
	note_calls(s);
	bpf_probe_read_kernel(s->registers, sizeof(struct pt_regs), USER_REGISTERS());
	at = STACK((struct pt_regs *)s->registers);
	for (int i = 0; i < STACK_BYTES / STACK_PAGE; i++) {
		part = BOUNDED(STACK_PAGE - (at & (STACK_PAGE - 1)), STACK_PAGE);
		if (bpf_probe_read_user(&s->stack[done & (STACK_BYTES - 1)], part, (void *)at))
			break;
		done += part;
		at += part;
	}
	s->bytes = done;
	return s;
}

static INLINE void send_copy(void *ctx, struct stack_copy *s)
{
	bpf_perf_event_output(ctx, MAP(stacks), BPF_F_CURRENT_CPU, s, sizeof(*s) - sizeof(s->stack) + BOUNDED(s->bytes + 1, STACK_BYTES));
	s->of = 0;
}

/* Whether a thread that went to sleep then has waited long. */
static INLINE bool is_long(u64 since)
{
	struct settings *s = settings();

	return s && bpf_ktime_get_ns() - since >= (u64)s->long_wait_us * 1000;
}

/* Not while --max-overhead pauses them. */
static INLINE bool wants_waits(void)
{
	struct settings *s = settings();

	return s && s->long_wait_us != NO_WAITS;
}

static INLINE bool sleeps(void *task)
{
	return HAS_FIELD(task_struct, __state) ? KERNEL_READ(task_struct, __state, task, u32) : KERNEL_READ(task_struct, state, task, long);
}

/* On sched_switch, which has the threads that leave and get the CPU; the one that leaves is still the running one. */
BARE_RAW_PROGRAM(sched_switch, stack_wait)
{
	void *before = (void *)RAW_ARG(ctx, 1);
	u32 tid = KERNEL_READ(task_struct, pid, (void *)RAW_ARG(ctx, 2), s32);
	struct stack_copy *s = slot_of(tid);

	if (!HAS_CURRENT_REGS)
		return 0;
	if (s && (u32)s->of == tid && s->reason == STACK_WAIT && tid) {
		if (is_long(s->since))
			send_copy(ctx, s);
		s->of = 0;
	}
	if (traced() && sleeps(before) && wants_waits())
		copied(STACK_WAIT, (u32)bpf_get_current_pid_tgid(), bpf_ktime_get_ns());
	return 0;
}

/* On sched_waking: a thread of the target wakes another one. */
BARE_RAW_PROGRAM(sched_waking, stack_waker)
{
	u32 woken = KERNEL_READ(task_struct, pid, (void *)RAW_ARG(ctx, 0), s32);
	struct stack_copy *s = slot_of(woken);

	if (!HAS_CURRENT_REGS || !traced() || !s || (u32)s->of != woken || s->reason != STACK_WAIT || !is_long(s->since))
		return 0;
	s = copied(STACK_WAKER, woken, s->since);
	if (s)
		send_copy(ctx, s);
	return 0;
}
