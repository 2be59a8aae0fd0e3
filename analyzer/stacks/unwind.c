// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * moescope-unwind: unwinds the stacks of a recording with elfutils' libdw, by the call frame information of the programs' files.
 *
 *	moescope-unwind STACKS ARCH CLOCK_ID,... VDSO OUT < REPLACED_FILES
 *
 * STACKS has the kernel's perf records (docs/recording.md). OUT.samples gets a `struct sample` each, OUT.stacks the numbers of each
 * stack's frames behind their count, innermost first, and OUT.frames a line of JSON each. REPLACED_FILES: lines "path<TAB>file" of
 * files that are read in place of others.
 */
#include <dwarf.h>
#include <elfutils/libdwfl.h>
#include <errno.h>
#include <fcntl.h>
#include <gelf.h>
#include <jansson.h>
#include <linux/perf_event.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

#define MOST_FRAMES 512
#define MOST_CALLERS 256
#define X86_REGISTERS 17
#define ARM_REGISTERS 33
#define WORD 8
#define PROBED_CALLS 8
#define RETURNS 3 /* enum stack_reason */

enum end {
	WHOLE,	  /* the stack's outermost function was reached */
	CUT,	  /* the copy of the stack ends before */
	UNKNOWN,  /* no call frame information leads on */
	TOO_DEEP, /* more than MOST_FRAMES */
};

struct sample {
	u64 time, since; /* ns; since: when the wait began, 0 for samples of the clock */
	u32 pid, tid, waited, stack;
	u8 kind, end, pad[6]; /* kind: 0 of the clock, otherwise enum stack_reason */
};

struct mapping {
	u64 start, end, offset;
	char *path;
};

struct process {
	u32 pid;
	struct mapping *maps;
	int count, room;
	bool is_changed;
	Dwfl *dwfl;
};

/* The bytes of a stack; from `same_from` on it is that of the thread's sample before. */
struct piece {
	u64 at, bytes, same_from;
	const u8 *data;
	const struct piece *before;
};

struct record {
	u64 time;
	const struct perf_event_header *header;
	const struct copy *returns; /* of a sample, or NULL */
	const struct piece *stack;  /* of a sample of the clock, or NULL */
};

/* A call whose return is probed: on the stack, the address of the kernel's trampoline stands in the place of its own. */
struct call {
	u64 stack, address;
};

/* A copied stack, behind the size of its bytes: struct stack_copy of bpf/structs.h. */
struct copy {
	u64 of;
	u32 reason, tid;
	u64 since, bytes;
	struct call calls[PROBED_CALLS];
	u64 registers[34];
	u8 stack[];
} __attribute__((packed));

/* What is unwound now: registers by DWARF's numbers, and the copied bytes. */
static struct {
	u64 registers[ARM_REGISTERS];
	u64 pc, stack_at;
	const struct piece *stack;
	bool was_cut, has_ended;
	struct call calls[PROBED_CALLS];
	int next_call;
	u64 trampoline; /* 0: none */
	u64 frames[MOST_FRAMES];
	bool is_call[MOST_FRAMES];
	int count;
} now;

static struct process *processes;
static int process_count;
static bool is_arm;
static u64 *clock_ids;
static int clock_count;
static const char *vdso;
static json_t *replaced;
static FILE *out_samples, *out_stacks, *out_frames;

/* Of libstdc++: a C++ name as in the source; NULL for others. */
char *__cxa_demangle(const char *mangled, char *buffer, size_t *length, int *status);

static void fail(const char *what)
{
	fprintf(stderr, "moescope-unwind: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void *grown(void *list, int *room, size_t each)
{
	*room = *room ? 2 * *room : 64;
	list = realloc(list, *room * each);
	if (!list)
		fail("out of memory");
	return list;
}

/* A set of byte strings, each with the number under which it was entered. */
struct set {
	struct entry {
		u64 hash;
		u32 bytes, number;
		const u8 *key;
	} *entries;
	u32 room, count;
};

static u64 hash_of(const u8 *key, u32 bytes)
{
	u64 hash = 14695981039346656037ULL; /* FNV-1a */

	for (u32 i = 0; i < bytes; i++)
		hash = (hash ^ key[i]) * 1099511628211ULL;
	return hash;
}

static struct entry *place(struct set *set, u64 hash, const u8 *key, u32 bytes)
{
	u32 at = hash & (set->room - 1);

	while (set->entries[at].key &&
	       (set->entries[at].hash != hash || set->entries[at].bytes != bytes || memcmp(set->entries[at].key, key, bytes)))
		at = (at + 1) & (set->room - 1);
	return &set->entries[at];
}

static void widen(struct set *set)
{
	struct set wide = {.room = set->room ? 2 * set->room : 1024, .count = set->count};

	wide.entries = calloc(wide.room, sizeof(*wide.entries));
	if (!wide.entries)
		fail("out of memory");
	for (u32 i = 0; i < set->room; i++) {
		struct entry *e = &set->entries[i];

		if (e->key)
			*place(&wide, e->hash, e->key, e->bytes) = *e;
	}
	free(set->entries);
	*set = wide;
}

/* The key's number; `is_new` if it was not in the set. */
static u32 number_in(struct set *set, const void *key, u32 bytes, bool *is_new)
{
	u64 hash = hash_of(key, bytes);
	struct entry *e;

	if (2 * set->count >= set->room)
		widen(set);
	e = place(set, hash, key, bytes);
	*is_new = !e->key;
	if (!e->key) {
		u8 *copy = malloc(bytes ? bytes : 1);

		*e = (struct entry){hash, bytes, set->count++, memcpy(copy, key, bytes)};
	}
	return e->number;
}

static struct process *process_of(u32 pid)
{
	static int room;

	for (int i = 0; i < process_count; i++)
		if (processes[i].pid == pid)
			return &processes[i];
	if (process_count == room)
		processes = grown(processes, &room, sizeof(*processes));
	processes[process_count] = (struct process){.pid = pid};
	return &processes[process_count++];
}

static void end_dwfl(struct process *p)
{
	if (p->dwfl)
		dwfl_end(p->dwfl);
	p->dwfl = NULL;
}

/*
 * What a new mapping covers is gone, and what was behind it: the kernel reports a program's interpreter with the gap between its
 * segments, where others may be.
 */
static void add_mapping(struct process *p, struct mapping m)
{
	int kept = 0;

	for (int i = 0; i < p->count; i++) {
		struct mapping old = p->maps[i];

		if (old.start < m.start && m.start < old.end)
			old.end = m.start;
		if (old.start >= m.end || old.end <= m.start)
			p->maps[kept++] = old;
	}
	p->count = kept;
	if (p->count == p->room)
		p->maps = grown(p->maps, &p->room, sizeof(*p->maps));
	p->maps[p->count++] = m;
	p->is_changed = true;
}

static void clear(struct process *p)
{
	p->count = 0;
	p->is_changed = true;
}

/* The bias of a file's addresses, if this mapping shows one of its segments; false otherwise. */
static bool bias_of(Elf *elf, const struct mapping *m, u64 *bias)
{
	size_t count;
	GElf_Phdr segment;

	if (elf_getphdrnum(elf, &count))
		return false;
	for (size_t i = 0; i < count; i++) {
		if (!gelf_getphdr(elf, i, &segment) || segment.p_type != PT_LOAD || !(segment.p_flags & PF_X))
			continue;
		if (m->offset < segment.p_offset + segment.p_filesz && m->offset + (m->end - m->start) > segment.p_offset) {
			*bias = m->start - m->offset + segment.p_offset - segment.p_vaddr;
			return true;
		}
	}
	return false;
}

static void report(Dwfl *dwfl, const struct mapping *m)
{
	const char *other = json_string_value(json_object_get(replaced, m->path));
	const char *path = !strcmp(m->path, "[vdso]") ? vdso : other ? other : m->path;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	struct stat file;
	u64 bias;
	Elf *elf;

	if (fd < 0)
		return;
	if (fstat(fd, &file) || !S_ISREG(file.st_mode)) {
		close(fd);
		return;
	}
	elf = elf_begin(fd, ELF_C_READ_MMAP, NULL);
	if (!elf || !bias_of(elf, m, &bias) || !dwfl_report_elf(dwfl, m->path, path, fd, bias, true)) {
		elf_end(elf);
		close(fd);
		return;
	}
	elf_end(elf);
}

static pid_t next_thread(Dwfl *dwfl, void *process, void **thread)
{
	(void)dwfl;
	if (*thread)
		return 0;
	*thread = process;
	return ((struct process *)process)->pid;
}

static bool get_thread(Dwfl *dwfl, pid_t tid, void *process, void **thread)
{
	(void)dwfl;
	(void)tid;
	*thread = process;
	return true;
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

static bool read_memory(Dwfl *dwfl, Dwarf_Addr address, Dwarf_Word *result, void *process)
{
	(void)dwfl;
	(void)process;
	const struct piece *p = now.stack;

	while (p && !holds(p, address))
		p = address >= p->same_from ? p->before : NULL;
	if (!p) {
		now.was_cut = now.was_cut || (address >= now.stack_at && address - now.stack_at < (64 << 20));
		return false;
	}
	memcpy(result, p->data + (address - p->at), WORD);
	*result = own_return(*result, address);
	return true;
}

static bool set_registers(Dwfl_Thread *thread, void *process)
{
	(void)process;
	if (is_arm)
		now.registers[30] = own_return(now.registers[30], 0);
	if (!dwfl_thread_state_registers(thread, 0, is_arm ? ARM_REGISTERS - 1 : X86_REGISTERS, now.registers))
		return false;
	dwfl_thread_state_register_pc(thread, now.pc);
	return true;
}

static const Dwfl_Thread_Callbacks callbacks = {
	.next_thread = next_thread, .get_thread = get_thread, .memory_read = read_memory, .set_initial_registers = set_registers};

static void prepare(struct process *p)
{
	static char *no_path = NULL;
	static const Dwfl_Callbacks finding = {.find_elf = dwfl_build_id_find_elf, .find_debuginfo = dwfl_standard_find_debuginfo,
					       .section_address = dwfl_offline_section_address, .debuginfo_path = &no_path};

	if (p->dwfl && !p->is_changed)
		return;
	end_dwfl(p);
	p->dwfl = dwfl_begin(&finding);
	dwfl_report_begin(p->dwfl);
	for (int i = 0; i < p->count; i++)
		report(p->dwfl, &p->maps[i]);
	dwfl_report_end(p->dwfl, NULL, NULL);
	dwfl_attach_state(p->dwfl, NULL, p->pid, &callbacks, p);
	p->is_changed = false;
}

static int add_frame(Dwfl_Frame *state, void *unused)
{
	Dwarf_Addr pc;
	bool is_activation;

	(void)unused;
	if (now.count == MOST_FRAMES || !dwfl_frame_pc(state, &pc, &is_activation))
		return DWARF_CB_ABORT;
	now.has_ended = !pc && now.count; /* a return address of 0 ends a stack */
	if (now.has_ended)
		return DWARF_CB_ABORT;
	now.frames[now.count] = pc;
	now.is_call[now.count++] = !is_activation;
	return DWARF_CB_OK;
}

static enum end unwind(struct process *p)
{
	now.count = 0;
	now.was_cut = now.has_ended = false;
	now.next_call = 0;
	now.trampoline = 0;
	for (int i = 0; i < p->count; i++)
		if (!strcmp(p->maps[i].path, "[uprobes]"))
			now.trampoline = p->maps[i].start;
	prepare(p);
	if (!dwfl_getthread_frames(p->dwfl, p->pid, add_frame, NULL))
		return now.was_cut ? CUT : WHOLE;
	if (now.has_ended)
		return WHOLE;
	if (!now.count) { /* the program counter alone is known */
		now.frames[0] = now.pc;
		now.is_call[now.count++] = false;
	}
	return now.count == MOST_FRAMES ? TOO_DEEP : now.was_cut ? CUT : UNKNOWN;
}

struct frame_key {
	u32 pid, is_call;
	u64 address;
};

static json_t *described(struct process *p, u64 address)
{
	Dwfl_Module *module = dwfl_addrmodule(p->dwfl, address);
	GElf_Off offset = 0;
	GElf_Sym symbol;
	Dwarf_Addr bias, low;
	const char *path = NULL, *name, *source;
	const struct mapping *m = NULL;
	Dwfl_Line *line;
	int number, status;
	json_t *frame = json_object();

	for (int i = 0; i < p->count; i++)
		if (p->maps[i].start <= address && address < p->maps[i].end)
			m = &p->maps[i];
	json_object_set_new(frame, "file", json_string(m ? m->path : ""));
	if (!module) {
		json_object_set_new(frame, "address", json_integer(address));
		return frame;
	}
	dwfl_module_info(module, NULL, &low, NULL, NULL, NULL, &path, NULL);
	dwfl_module_getelf(module, &bias);
	json_object_set_new(frame, "address", json_integer(address - bias));
	name = dwfl_module_addrinfo(module, address, &offset, &symbol, NULL, NULL, NULL);
	if (name && offset < (symbol.st_size ? symbol.st_size : 4096)) {
		char *plain = __cxa_demangle(name, NULL, NULL, &status);

		json_object_set_new(frame, "function", json_string(plain ? plain : name));
		free(plain);
		json_object_set_new(frame, "offset", json_integer(offset));
	}
	line = dwfl_module_getsrc(module, address);
	source = line ? dwfl_lineinfo(line, NULL, &number, NULL, NULL, NULL) : NULL;
	if (source)
		json_object_set_new(frame, "line", json_sprintf("%s:%d", source, number));
	return frame;
}

static u32 frame_number(struct process *p, int at)
{
	static struct set known;
	struct frame_key key = {p->pid, now.is_call[at], now.frames[at]};
	bool is_new;
	u32 number = number_in(&known, &key, sizeof(key), &is_new);

	if (is_new) {
		json_t *frame = described(p, key.address - key.is_call);

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
	for (int i = 0; i < now.count; i++)
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
	now.count = 0;
	s->end = UNKNOWN;
	if (*registers) { /* 0: a thread of the kernel, or one that ends */
		take_perf_registers(registers + 1);
		now.stack = record->stack;
		memset(now.calls, 0, sizeof(now.calls));
		if (record->returns)
			memcpy(now.calls, record->returns->calls, sizeof(now.calls));
		s->end = unwind(process_of(s->pid));
	}
	put(s, process_of(s->pid), words + 4, words[3]);
}

static void take_sent(struct sample *s, const struct copy *copy, const u8 *end)
{
	static u64 registers[34];
	struct piece stack;

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
	stack = (struct piece){.at = now.stack_at, .bytes = copy->bytes, .same_from = UINT64_MAX, .data = copy->stack};
	now.stack = &stack;
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
static const struct copy *sent_in(const struct perf_event_header *header)
{
	const u64 *words = (const u64 *)(header + 1);

	return is_clock(words[0]) ? NULL : (const void *)((const u8 *)words + SAMPLE_HEAD + sizeof(u32));
}

static const struct copy *returns_in(const struct perf_event_header *header)
{
	const struct copy *sent = sent_in(header);

	return sent && sent->stack <= (const u8 *)header + header->size && sent->reason == RETURNS ? sent : NULL;
}

static void take_sample(const struct record *record)
{
	const u8 *end = (const u8 *)record->header + record->header->size;
	const struct copy *sent = sent_in(record->header);
	const u64 *words = (const u64 *)(record->header + 1);
	struct sample s = {.time = words[2], .pid = words[1], .tid = words[1] >> 32};

	if (!sent)
		take_clock(&s, record);
	else if (sent->stack <= end && sent->reason != RETURNS)
		take_sent(&s, sent, end);
}

static void take_mapping(const struct perf_event_header *header)
{
	const u8 *at = (const u8 *)header;
	u64 start = *(const u64 *)(at + 16), bytes = *(const u64 *)(at + 24), offset = *(const u64 *)(at + 32);

	add_mapping(process_of(*(const u32 *)(at + 8)), (struct mapping){start, start + bytes, offset, strdup((const char *)at + 72)});
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
			clear(process_of(*(const u32 *)(header + 1)));
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

/* The stack of a sample of the clock; those of a thread continue each other in the file's order. */
static const struct piece *stack_in(const struct perf_event_header *header)
{
	static struct set threads;
	static const struct piece **lasts;
	static int room;
	const u64 *registers = registers_in(header), *size, *end = (const u64 *)((const u8 *)header + header->size);
	struct piece *piece;
	bool is_new;
	u32 thread = number_in(&threads, (const u32 *)(header + 1) + 3, sizeof(u32), &is_new);
	u64 top;

	while ((int)thread >= room)
		lasts = grown(lasts, &room, sizeof(*lasts));
	if (is_new)
		lasts[thread] = NULL;
	if (!registers || !*registers)
		return NULL;
	size = registers + 1 + (is_arm ? ARM_REGISTERS : 20);
	if (size + 1 >= end || *size > (u64)((const u8 *)end - (const u8 *)(size + 1)) - WORD)
		return NULL;
	piece = malloc(sizeof(*piece));
	*piece = (struct piece){.at = registers[1 + (is_arm ? 31 : 7)], .bytes = *size, .data = (const u8 *)(size + 1)};
	memcpy(&top, piece->data + *size, sizeof(top));
	piece->same_from = top ? piece->at + piece->bytes : UINT64_MAX;
	piece->before = top ? lasts[thread] : NULL;
	return lasts[thread] = piece;
}

/* The whole records of the file, in the order of time: each CPU has its own in the file. */
static struct record *records_in(const u8 *data, u64 bytes, int *count)
{
	const struct copy *returns = NULL; /* they stand before the sample that they belong to */
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
		if (header->type == PERF_RECORD_SAMPLE && !sent_in(header)) {
			r.returns = returns;
			r.stack = stack_in(header);
		}
		if (header->type == PERF_RECORD_SAMPLE)
			returns = returns_in(header);
		records[(*count)++] = r;
		at += header->size;
	}
	qsort(records, *count, sizeof(*records), by_time);
	return records;
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

static void read_replaced(void)
{
	char line[8192], *tab;

	replaced = json_object();
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		tab = strchr(line, '\t');
		if (tab) {
			*tab = 0;
			json_object_set_new(replaced, line, json_string(tab + 1));
		}
	}
}

int main(int argc, char **argv)
{
	struct record *records;
	struct stat file;
	const u8 *data;
	int fd, count = 0, room = 0;

	if (argc != 6) {
		fputs("usage: moescope-unwind STACKS ARCH CLOCK_ID,... VDSO OUT < REPLACED_FILES\n", stderr);
		return 2;
	}
	is_arm = !strcmp(argv[2], "aarch64");
	for (char *each; (each = strsep(&argv[3], ","));) {
		if (clock_count == room)
			clock_ids = grown(clock_ids, &room, sizeof(*clock_ids));
		clock_ids[clock_count++] = strtoull(each, NULL, 10);
	}
	vdso = argv[4];
	read_replaced();
	elf_version(EV_CURRENT);
	fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &file))
		fail(argv[1]);
	data = file.st_size ? mmap(NULL, file.st_size, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
	if (data == MAP_FAILED)
		fail(argv[1]);
	out_samples = create(argv[5], "samples");
	out_stacks = create(argv[5], "stacks");
	out_frames = create(argv[5], "frames");
	records = records_in(data, file.st_size, &count);
	for (int i = 0; i < count; i++)
		take(&records[i]);
	if (fclose(out_samples) || fclose(out_stacks) || fclose(out_frames))
		fail(argv[5]);
	return 0;
}
