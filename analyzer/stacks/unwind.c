// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * moescope-unwind: unwinds the stacks of a recording with elfutils' libdw, by the call frame information of the programs' files.
 *
 *	moescope-unwind STACKS FORMAT HEAD_BYTES ARCH CLOCK_ID,... FOLDER OUT < REPLACED_FILES
 *
 * STACKS has the kernel's perf records (docs/recording.md); FORMAT and HEAD_BYTES, of a copied stack, are those that the manifest
 * names. OUT.samples gets a `struct sample` each, OUT.stacks the numbers of each stack's frames behind their count, innermost first,
 * and OUT.frames a line of JSON each. REPLACED_FILES: lines "path<TAB>file" of files that are read in place of others. FOLDER: the
 * recording's.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "unwind.h"
#include "stack_copy.h" /* of bpf/ */

#define MOST_CALLERS 256
#define X86_REGISTERS 17
#define ARM_REGISTERS 33

/* In the file it stands behind the size of its bytes, and is not aligned. */
typedef struct stack_copy copy __attribute__((aligned(4)));

struct sample {
	u64 time, since; /* ns; since: when the wait began, 0 for samples of the clock */
	u32 pid, tid, waited, stack;
	u8 kind, end, pad[6]; /* kind: 0 of the clock, otherwise enum stack_reason */
};

/* Bytes of a stack; from `same_from` on it is that of the thread's record before, and known up to `end`. */
struct piece {
	u64 at, bytes, same_from, end;
	const u8 *data;
	const struct piece *before;
};

struct record {
	u64 time;
	const struct perf_event_header *header;
	const copy *returns;	   /* of a sample, or NULL */
	const struct piece *stack; /* or NULL */
};

/* What is unwound now: registers by DWARF's numbers, and the copied bytes. */
static struct {
	u64 registers[ARM_REGISTERS];
	u64 pc, stack_at;
	const struct piece *stack;
	bool was_cut;
	struct probed_call calls[PROBED_CALLS];
	int next_call;
	u64 trampoline; /* 0: none */
	struct frames frames;
} now;

bool is_arm;
static u64 *clock_ids;
static int clock_count;
static FILE *out_samples, *out_stacks, *out_frames;

void fail(const char *what)
{
	fprintf(stderr, "moescope-unwind: %s: %s\n", what, strerror(errno));
	exit(1);
}

void *grown(void *list, int *room, size_t each)
{
	*room = *room ? 2 * *room : 64;
	list = realloc(list, *room * each);
	if (!list)
		fail("out of memory");
	return list;
}

/* The return address at a place of the stack, or in a register (at 0), where the kernel's trampoline has taken its place. */
static u64 own_return(u64 value, u64 at)
{
	if (!now.trampoline || value != now.trampoline)
		return value;
	for (int i = 0; i < PROBED_CALLS; i++)
		if (at && now.calls[i].stack == at)
			return now.calls[i].address;
	return now.next_call < PROBED_CALLS ? now.calls[now.next_call++].address : 0;
}

static bool holds(const struct piece *p, u64 address)
{
	return address >= p->at && p->bytes >= WORD && address - p->at <= p->bytes - WORD;
}

bool read_stack(u64 address, u64 *value)
{
	const struct piece *p = now.stack && address <= now.stack->end - WORD ? now.stack : NULL;

	while (p && !holds(p, address))
		p = address >= p->same_from ? p->before : NULL;
	if (!p) {
		now.was_cut = now.was_cut || (address >= now.stack_at && address - now.stack_at < (64 << 20));
		return false;
	}
	memcpy(value, p->data + (address - p->at), WORD);
	*value = own_return(*value, address);
	return true;
}

bool was_cut(void)
{
	return now.was_cut;
}

static enum end unwind(struct process *p)
{
	now.was_cut = false;
	now.next_call = 0;
	now.trampoline = 0;
	for (int i = 0; i < p->count; i++)
		if (!strcmp(p->maps[i].path, "[uprobes]"))
			now.trampoline = p->maps[i].start;
	if (is_arm)
		now.registers[30] = own_return(now.registers[30], 0);
	prepare(p);
	return unwind_registers(p, now.registers, now.pc, &now.frames);
}

struct frame_key {
	u32 pid, age;
	u64 address;
	u32 is_call, way;
};

static u32 frame_number(struct process *p, int at)
{
	static struct set known;
	const struct frame *f = &now.frames.rows[at];
	struct frame_key key = {p->pid, p->age, f->address, f->is_call, f->way};
	bool is_new;
	u32 number = number_in(&known, &key, sizeof(key), &is_new);

	if (is_new) {
		json_t *frame = described(p, f->address - f->is_call, f->way);

		json_dumpf(frame, out_frames, JSON_COMPACT | JSON_ENSURE_ASCII);
		fputc('\n', out_frames);
		json_decref(frame);
	}
	return number;
}

/* The stack's number; kernel's callers first, which have the address's lower half marked as theirs. */
static u32 stack_number(struct process *p, const u64 *callers, u64 caller_count)
{
	static struct set known;
	static u64 words[MOST_CALLERS + MOST_FRAMES];
	u32 count = 0, number;
	bool is_new;

	for (u64 i = 0; i < caller_count && count < MOST_CALLERS; i++)
		if (callers[i] >> 63 && callers[i] < (u64)-4095)
			words[count++] = callers[i];
	for (int i = 0; i < now.frames.count; i++)
		words[count++] = frame_number(p, i);
	number = number_in(&known, words, count * sizeof(*words), &is_new);
	if (is_new) {
		u64 length = count;

		fwrite(&length, sizeof(length), 1, out_stacks);
		fwrite(words, sizeof(*words), count, out_stacks);
	}
	return number;
}

/* perf's order of x86-64's registers, without segments → DWARF's */
static void take_perf_registers(const u64 *r)
{
	static const u8 dwarf[] = {0, 3, 2, 1, 4, 5, 6, 7, 16, 255, 255, 255, 8, 9, 10, 11, 12, 13, 14, 15};

	if (is_arm) {
		memcpy(now.registers, r, 32 * WORD);
		now.pc = r[32];
		now.stack_at = r[31];
		return;
	}
	for (int i = 0; i < 20; i++)
		if (dwarf[i] < X86_REGISTERS)
			now.registers[dwarf[i]] = r[i];
	now.pc = now.registers[16];
	now.stack_at = now.registers[7];
}

/* The kernel's order, struct pt_regs */
static void take_kernel_registers(const u64 *r)
{
	static const u8 dwarf[] = {15, 14, 13, 12, 6, 3, 11, 10, 9, 8, 0, 2, 1, 4, 5, 255, 16, 255, 255, 7, 255};

	if (is_arm) {
		take_perf_registers(r);
		return;
	}
	for (int i = 0; i < 21; i++)
		if (dwarf[i] < X86_REGISTERS)
			now.registers[dwarf[i]] = r[i];
	now.pc = now.registers[16];
	now.stack_at = now.registers[7];
}

static void put(struct sample *s, struct process *p, const u64 *callers, u64 count)
{
	s->stack = stack_number(p, callers, count);
	fwrite(s, sizeof(*s), 1, out_samples);
}

/* Where a sample of the clock has its registers, behind the callers; NULL if it is damaged. */
static const u64 *registers_in(const struct perf_event_header *header)
{
	const u64 *words = (const u64 *)(header + 1), *end = (const u64 *)((const u8 *)header + header->size);

	return words[3] < (u64)(end - words) - 5 ? words + 4 + words[3] : NULL;
}

/* A sample of the clock: callers in the kernel, registers, stack. */
static void take_clock(struct sample *s, const struct record *record)
{
	const u64 *words = (const u64 *)(record->header + 1), *registers = registers_in(record->header);

	if (!registers)
		return;
	now.frames.count = 0;
	s->end = WHOLE;
	if (*registers) { /* 0: a thread that ends and has no memory of the user any more */
		take_perf_registers(registers + 1);
		now.stack = record->stack;
		memset(now.calls, 0, sizeof(now.calls));
		if (record->returns)
			memcpy(now.calls, record->returns->calls, sizeof(now.calls));
		s->end = unwind(process_of(s->pid));
	}
	put(s, process_of(s->pid), words + 4, words[3]);
}

static void take_sent(struct sample *s, const copy *copy, const struct piece *stack, const u8 *end)
{
	static u64 registers[34];

	if (copy->bytes > (u64)(end - copy->stack))
		return;
	s->tid = copy->of;
	s->pid = copy->of >> 32;
	s->kind = copy->reason;
	s->waited = copy->tid;
	s->since = copy->since;
	memcpy(registers, copy->registers, sizeof(registers));
	memcpy(now.calls, copy->calls, sizeof(now.calls));
	take_kernel_registers(registers);
	now.stack = stack;
	s->end = unwind(process_of(s->pid));
	put(s, process_of(s->pid), NULL, 0);
}

static bool is_clock(u64 id)
{
	for (int i = 0; i < clock_count; i++)
		if (clock_ids[i] == id)
			return true;
	return false;
}

#define SAMPLE_HEAD 24 /* id, thread, time */

/* What a program sent; NULL for a sample of the clock. */
static const copy *sent_in(const struct perf_event_header *header)
{
	const u64 *words = (const u64 *)(header + 1);

	return is_clock(words[0]) ? NULL : (const void *)((const u8 *)words + SAMPLE_HEAD + sizeof(u32));
}

static const copy *returns_in(const struct perf_event_header *header)
{
	const copy *sent = sent_in(header);

	return sent && sent->stack <= (const u8 *)header + header->size && sent->reason == STACK_RETURNS ? sent : NULL;
}

static void take_sample(const struct record *record)
{
	const u8 *end = (const u8 *)record->header + record->header->size;
	const copy *sent = sent_in(record->header);
	const u64 *words = (const u64 *)(record->header + 1);
	struct sample s = {.time = words[2], .pid = words[1], .tid = words[1] >> 32};

	if (!sent)
		take_clock(&s, record);
	else if (sent->stack <= end && sent->reason != STACK_RETURNS)
		take_sent(&s, sent, record->stack, end);
}

/* By the kernel's records: what is mapped is known by the build's id, or by the file's inode. */
static void take_mapping(const struct perf_event_header *header)
{
	const u8 *at = (const u8 *)header;
	u64 start = *(const u64 *)(at + 16), bytes = *(const u64 *)(at + 24), offset = *(const u64 *)(at + 32);
	struct mapping m = {.start = start, .end = start + bytes, .offset = offset, .path = strdup((const char *)at + 72)};

	if (header->misc & PERF_RECORD_MISC_MMAP_BUILD_ID) {
		m.id_bytes = at[40] < sizeof(m.id) ? at[40] : sizeof(m.id);
		memcpy(m.id, at + 44, m.id_bytes);
	} else
		m.inode = *(const u64 *)(at + 48);
	add_mapping(process_of(*(const u32 *)(at + 8)), m);
}

static void take_fork(const struct perf_event_header *header)
{
	const u32 *words = (const u32 *)(header + 1);
	u32 pid = words[0], parent = words[1];

	if (pid == parent)
		return;
	process_of(pid);
	for (int i = 0; i < process_of(parent)->count; i++)
		add_mapping(process_of(pid), process_of(parent)->maps[i]);
}

static void take(const struct record *record)
{
	const struct perf_event_header *header = record->header;

	switch (header->type) {
	case PERF_RECORD_SAMPLE: take_sample(record); break;
	case PERF_RECORD_MMAP2: take_mapping(header); break;
	case PERF_RECORD_FORK: take_fork(header); break;
	case PERF_RECORD_COMM:
		if (header->misc & PERF_RECORD_MISC_COMM_EXEC)
			clear_mappings(process_of(*(const u32 *)(header + 1)));
	}
}

static int by_time(const void *a, const void *b)
{
	const struct record *first = a, *second = b;

	if (first->time != second->time)
		return first->time < second->time ? -1 : 1;
	return first->header < second->header ? -1 : 1;
}

static u64 time_of(const struct perf_event_header *header)
{
	return header->type == PERF_RECORD_SAMPLE ? ((const u64 *)(header + 1))[2]
						  : ((const u64 *)((const u8 *)header + header->size))[-2];
}

/* A record's stack, behind that of the thread's record before: they continue each other in the file's order. */
static const struct piece *add_piece(u32 tid, u64 at, u64 bytes, u64 same, const u8 *data)
{
	static struct set threads;
	static const struct piece **lasts;
	static int room;
	bool is_new;
	u32 thread = number_in(&threads, &tid, sizeof(tid), &is_new);
	struct piece *piece = malloc(sizeof(*piece));

	while ((int)thread >= room)
		lasts = grown(lasts, &room, sizeof(*lasts));
	*piece = (struct piece){.at = at, .bytes = bytes, .same_from = same ? at + bytes : UINT64_MAX, .end = at + bytes + same, .data = data};
	piece->before = same && !is_new ? lasts[thread] : NULL;
	return lasts[thread] = piece;
}

static const struct piece *stack_of_sample(const struct perf_event_header *header)
{
	const u64 *registers = registers_in(header), *size, *end = (const u64 *)((const u8 *)header + header->size);
	const u8 *data;
	u64 same;

	if (!registers || !*registers)
		return NULL;
	size = registers + 1 + (is_arm ? ARM_REGISTERS : 20);
	data = (const u8 *)(size + 1);
	if (size + 1 >= end || *size > (u64)((const u8 *)end - data) - WORD)
		return NULL;
	memcpy(&same, data + *size, sizeof(same));
	return add_piece(((const u32 *)(header + 1))[3], registers[1 + (is_arm ? 31 : 7)], *size, same, data);
}

static const struct piece *stack_of_copy(const struct perf_event_header *header, const copy *copy)
{
	const u8 *end = (const u8 *)header + header->size;

	if (copy->stack > end || copy->bytes > (u64)(end - copy->stack) || copy->reason == STACK_RETURNS)
		return NULL;
	return add_piece(copy->of, copy->registers[is_arm ? 31 : 19], copy->bytes, copy->same, copy->stack);
}

/* The whole records of the file, in the order of time: each CPU has its own in the file. */
static struct record *records_in(const u8 *data, u64 bytes, int *count)
{
	const copy *returns = NULL; /* they stand before the sample that they belong to */
	struct record *records = NULL;
	int room = 0;

	for (u64 at = 0; at + 48 <= bytes;) {
		const struct perf_event_header *header = (const void *)(data + at);
		struct record r = {.header = header};

		if (header->size < 48 || header->size % 8 || at + header->size > bytes)
			break;
		if (*count == room)
			records = grown(records, &room, sizeof(*records));
		r.time = time_of(header);
		if (header->type == PERF_RECORD_SAMPLE && sent_in(header))
			r.stack = stack_of_copy(header, sent_in(header));
		else if (header->type == PERF_RECORD_SAMPLE) {
			r.returns = returns;
			r.stack = stack_of_sample(header);
		}
		if (header->type == PERF_RECORD_SAMPLE)
			returns = returns_in(header);
		records[(*count)++] = r;
		at += header->size;
	}
	qsort(records, *count, sizeof(*records), by_time);
	return records;
}

/* A file of another format would be misread: its records have no mark of their own. */
static void check_format(const char *path, const char *format, const char *head_bytes)
{
	if (strtoull(format, NULL, 10) == STACKS_FORMAT && strtoull(head_bytes, NULL, 10) == offsetof(struct stack_copy, stack))
		return;
	fprintf(stderr, "%s has format %s with heads of %s bytes, this program reads %d with %zu; use the MoEScope release that wrote it, or record again\n",
		path, format, head_bytes, STACKS_FORMAT, offsetof(struct stack_copy, stack));
	exit(1);
}

static FILE *create(const char *folder, const char *name)
{
	char path[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s.%s", folder, name);
	file = fopen(path, "we");
	if (!file)
		fail(path);
	return file;
}

int main(int argc, char **argv)
{
	struct record *records;
	struct stat file;
	const u8 *data;
	int fd, count = 0, room = 0;

	if (argc != 8) {
		fputs("usage: moescope-unwind STACKS FORMAT HEAD_BYTES ARCH CLOCK_ID,... FOLDER OUT < REPLACED_FILES\n", stderr);
		return 2;
	}
	check_format(argv[1], argv[2], argv[3]);
	is_arm = !strcmp(argv[4], "aarch64");
	for (char *each; (each = strsep(&argv[5], ","));) {
		if (clock_count == room)
			clock_ids = grown(clock_ids, &room, sizeof(*clock_ids));
		clock_ids[clock_count++] = strtoull(each, NULL, 10);
	}
	folder = argv[6];
	read_replaced(stdin);
	elf_version(EV_CURRENT);
	fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &file))
		fail(argv[1]);
	data = file.st_size ? mmap(NULL, file.st_size, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
	if (data == MAP_FAILED)
		fail(argv[1]);
	out_samples = create(argv[7], "samples");
	out_stacks = create(argv[7], "stacks");
	out_frames = create(argv[7], "frames");
	records = records_in(data, file.st_size, &count);
	for (int i = 0; i < count; i++)
		take(&records[i]);
	if (fclose(out_samples) || fclose(out_stacks) || fclose(out_frames))
		fail(argv[7]);
	return 0;
}
