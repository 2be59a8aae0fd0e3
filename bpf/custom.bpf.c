// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Functions that a user names: one program for all entries and one for all returns. The probe's cookie is the key of the row
 * in `call_specs` that lists what to read; user space writes the row before it attaches the probe.
 */

#ifdef LOADER_BCC
#define cookie_of(ctx) bpf_get_attach_cookie(ctx)
#else
/*
 * Before Linux 5.15 (`bpf: Add bpf_get_attach_cookie() BPF helper`) the loader gives each probe its own copy of the program,
 * with its cookie in place of this number.
 */
static INLINE u32 cookie_of(struct pt_regs *ctx)
{
	u32 written;

	if (has_cookies)
		return bpf_get_attach_cookie(ctx);
	asm volatile("%0 = 0x0C00C1E5" : "=r"(written));
	return written;
}
#endif

/* 1 if a read of `width` bytes failed, by sign bits; the failure of a read of no bytes does not count. */
#define FAILED(result, width) (((u64)(result) & (0 - (u64)(width))) >> 63)

/* Reads an argument without a branch: a read of no bytes leaves the value unchanged. Sets `bit` of `unread` if a read failed. */
static INLINE u64 read_argument(struct arg_spec *spec, u64 *registers, u64 *unread, u32 bit)
{
	u64 value[2] = {registers[spec->from & 7], 0};
	u64 failed = 0;

	for (u32 i = 0; i < 2; i++) {
		u64 width = spec->width[i] & 15;
		long result = bpf_probe_read_user(value, width, (void *)(value[0] + spec->offset[i]));

		failed |= FAILED(result, width);
	}
	*unread |= failed << bit;
	return value[0];
}

static INLINE void send_call_text(void *ctx, struct call_spec *spec, u64 *registers, u32 index, u32 part, u64 call_ts)
{
	u64 unread = 0, address;
	RECORD(rec_call_text, r);

	if (!reserve(r, KIND_CALL_TEXT, ENGINE_USER))
		return;
	r->h.ts = call_ts; /* joins it to its call */
	r->probe = index >> 1;
	r->part = part;
	r->at_return = index & 1;
	for (u32 i = 0; i < CALL_VALUES; i++)
		r->values[i] = read_argument(&spec->numbers[part][i], registers, &unread, i);
	address = read_argument(&spec->texts[part - 1], registers, &unread, CALL_VALUES);
	r->text[0] = 0;
	unread |= ((u64)bpf_probe_read_user_str(r->text, sizeof(r->text), (void *)address) >> 63) << CALL_VALUES;
	r->unread = unread;
	submit(ctx, r);
}

/* struct rec_call_end has the layout of struct rec_call_begin. */
static INLINE int record_call(struct pt_regs *ctx, u16 kind, u64 frame)
{
	u64 registers[8] = {ARG1(ctx), ARG2(ctx), ARG3(ctx), ARG4(ctx), ARG5(ctx), ARG6(ctx), RESULT(ctx), 0};
	u32 index = cookie_of(ctx);
	u64 unread = 0, call_ts;
	struct call_spec *spec;
	RECORD(rec_call_begin, r);

	spec = map_lookup(MAP(call_specs), &index);
	if (!spec || !reserve(r, kind, ENGINE_USER))
		return 0;
	r->probe = index >> 1;
	r->frame = frame;
	for (u32 i = 0; i < CALL_VALUES; i++)
		r->values[i] = read_argument(&spec->numbers[0][i], registers, &unread, i);
	r->unread = unread;
	call_ts = r->h.ts;
	submit(ctx, r);
	for (u32 part = 1; part < CALL_PARTS; part++) {
		if (part >= spec->parts)
			break;
		send_call_text(ctx, spec, registers, index, part, call_ts);
	}
	return 0;
}

/* A step begins at the function's entry and lasts until the thread enters it again. */
UPROBE(custom_step)
{
	if (t->user_steps)
		token_end(ctx, ENGINE_USER, t->user_steps - 1, 0);
	return token_begin(ctx, ENGINE_USER, t->user_steps++, PHASE_UNKNOWN, 0, ~0U, 0);
}

/* The stack pointer after the function's return: the same at entry and return, and different for other open calls. */
UPROBE(custom_begin)
{
	return record_call(ctx, KIND_CALL_BEGIN, STACK(ctx) + RETURN_ADDRESS_BYTES);
}

UPROBE(custom_end)
{
	return record_call(ctx, KIND_CALL_END, STACK(ctx));
}

UPROBE(custom_exit)
{
	return record_call(ctx, KIND_CALL_END, STACK(ctx) + RETURN_ADDRESS_BYTES);
}
