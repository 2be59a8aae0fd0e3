// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Clocks and heat, whichever process runs: frequencies of CPUs, their limits, temperatures, cooling. */

static INLINE struct rec_heat *fill_heat(struct rec_heat *r, u16 what, u16 number, s32 value)
{
	r->what = what;
	r->number = number;
	r->value = value;
	__builtin_memset(r->name, 0, sizeof(r->name));
	return r;
}

static INLINE void send_heat(void *ctx, u16 what, u16 number, s32 value)
{
	RECORD(rec_heat, r);

	if (reserve(r, KIND_HEAT, ENGINE_KERNEL)) {
		fill_heat(r, what, number, value);
		submit(ctx, r);
	}
}

TRACEPOINT(power, cpu_frequency)
{
	send_heat(ctx, HEAT_KHZ, FIELD(ctx, cpu, cpu_id, u32), FIELD(ctx, cpu, state, u32));
	return 0;
}

TRACEPOINT(power, cpu_frequency_limits)
{
	u32 cpu = FIELD(ctx, cpu_frequency_limits, cpu_id, u32);

	send_heat(ctx, HEAT_LEAST_KHZ, cpu, FIELD(ctx, cpu_frequency_limits, min_freq, u32));
	send_heat(ctx, HEAT_MOST_KHZ, cpu, FIELD(ctx, cpu_frequency_limits, max_freq, u32));
	return 0;
}

TRACEPOINT(thermal, thermal_temperature)
{
	send_heat(ctx, HEAT_ZONE, FIELD(ctx, thermal_temperature, id, s32), FIELD(ctx, thermal_temperature, temp, s32));
	return 0;
}

/* It has the device's type, not its number. */
TRACEPOINT(thermal, cdev_update)
{
	u32 type = FIELD(ctx, cdev_update, __data_loc_type, u32); /* low half: offset of the text */
	RECORD(rec_heat, r);

	if (!reserve(r, KIND_HEAT, ENGINE_KERNEL))
		return 0;
	fill_heat(r, HEAT_COOLING, HEAT_UNNUMBERED, FIELD(ctx, cdev_update, target, unsigned long));
	bpf_probe_read_kernel_str(r->name, sizeof(r->name), (char *)ctx + (type & 0xFFFF));
	submit(ctx, r);
	return 0;
}
