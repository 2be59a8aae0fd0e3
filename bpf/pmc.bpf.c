// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Performance counters that the tracer opened for the running thread. */

static INLINE u32 counting(void)
{
	struct settings *s = settings();

	return s ? s->n_counters : 0;
}

/* Called right after an operator's record, or share, of time `ts`: sends the counters' values at that point. */
static INLINE void send_pmc(void *ctx, u64 ts)
{
	u32 tid = (u32)bpf_get_current_pid_tgid(), n = counting(), *slot;
	RECORD(rec_pmc, r);

	if (!n)
		return;
	if (!reserve(r, KIND_PMC, ENGINE_KERNEL))
		return;
	r->h.ts = ts;
	slot = map_lookup(MAP(counted), &tid);
	for (u32 i = 0; i < MAX_PMC; i++) {
		struct bpf_perf_event_value value = {};

		r->values[i] = NO_COUNT;
		if (!slot || i >= n)
			continue;
		if (!bpf_perf_event_read_value(MAP(counters), *slot + i, &value, sizeof(value)))
			r->values[i] = value.counter;
	}
	submit(ctx, r);
}
