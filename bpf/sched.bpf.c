// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The scheduler, for the target's threads and for whoever displaced them. Tracepoint formats are the kernel's stable ones. */

struct sched_switch_args {
	u64 common;
	char prev_comm[16];
	s32 prev_pid;
	s32 prev_prio;
	s64 prev_state;
	char next_comm[16];
	s32 next_pid;
	s32 next_prio;
};

TRACEPOINT(sched, sched_switch, struct sched_switch_args)
{
	u32 prev = ctx->prev_pid, next = ctx->next_pid;
	bool prev_traced = map_lookup(MAP(threads), &prev) != 0;
	struct rec_sched_switch *r;

	if (!prev_traced && !map_lookup(MAP(threads), &next))
		return 0;
	r = new_event(KIND_SCHED_SWITCH, ENGINE_KERNEL);
	if (!r)
		return 0;
	r->prev_tid = prev;
	r->next_tid = next;
	r->prev_state = ctx->prev_state;
	r->prev_prio = ctx->prev_prio;
	r->next_prio = ctx->next_prio;
	r->comm_of_next = prev_traced; /* our own threads' names are known: tell the other's */
	r->pad = 0;
	if (prev_traced)
		bpf_probe_read_kernel(r->comm, sizeof(r->comm), ctx->next_comm);
	else
		bpf_probe_read_kernel(r->comm, sizeof(r->comm), ctx->prev_comm);
	submit(r);
	return 0;
}

struct sched_waking_args {
	u64 common;
	char comm[16];
	s32 pid;
	s32 prio;
	s32 target_cpu;
};

TRACEPOINT(sched, sched_waking, struct sched_waking_args)
{
	u32 woken = ctx->pid;
	struct rec_sched_waking *r;

	if (!map_lookup(MAP(threads), &woken))
		return 0;
	r = new_event(KIND_SCHED_WAKING, ENGINE_KERNEL);
	if (!r)
		return 0;
	r->woken_tid = woken;
	r->target_cpu = ctx->target_cpu;
	r->prio = ctx->prio;
	r->pad = 0;
	bpf_probe_read_kernel(r->comm, sizeof(r->comm), ctx->comm);
	submit(r);
	return 0;
}
