// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Stacks: samples of the CPUs' clocks, and those that BPF programs send (bpf/stacks.bpf.c). The kernel writes registers, a copy of
 * the user's stack and its own callers into a buffer for each CPU; `stacks.bin` has these records as they are, with those of
 * mappings, new processes and programs that a reader needs to unwind them (docs/recording.md).
 */
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "buffers.h"
#include "kernel_features.h"

#define SHARE_BYTES (4ULL << 20) /* of each CPU */
#define SAMPLE_STACK_BYTES 61440 /* copied at a sample; a record has less than 64 KiB */
#define MOST_STACKS 256
#define WHOLE_EVERY 64 /* records of a thread: one is written whole, so that a reader need not go back far */
#define IMAGE_BYTES (128 << 10)
#define MOST_LEFT_OUT 8192 /* at a stack's far end, so that a record can be written by what it differs in */
#define WORD 8
#define SENT_AT 28 /* id, thread, time, size: before what a program sent */
#define MOST_KERNEL_PLACES (1 << 16) /* a power of two */
#define FIRST_OF_KERNEL (1ULL << 63)
#define FIRST_MARK ((u64)-4095) /* PERF_CONTEXT_*: not an address */

#if defined(__x86_64__)
#define REGISTERS 0xff0fffULL /* without the segments of data, which perf does not have */
#define STACK_REGISTER 7
#define STACK_WORD 19 /* of struct pt_regs */
#else
#define REGISTERS ((1ULL << 33) - 1)
#define STACK_REGISTER 31
#define STACK_WORD 31
#endif

struct cpu {
	struct perf_event_mmap_page *page;
	const u8 *data;
	u64 head; /* up to which records are taken in this turn */
	u64 lost;
	int fd;
	u64 clock_id; /* the kernel's for the samples of the clock */
};

/* A thread's stack as its records so far show it: the bytes below `top`, of which `bytes` are known. */
static struct image {
	u32 tid, age;
	u64 top, bytes;
	u8 *data; /* ends at `top` */
} images[MOST_STACKS];

static struct cpu *cpus;
static int cpu_count;
static u32 hz;
static u64 samples, sent_count;
static bool has_waits;
static u64 kernel_places[MOST_KERNEL_PLACES];
static u8 *turned; /* a record that continues at its buffer's begin */
static const struct choice *choice;
static time_t began; /* s since 1970 */

/* Both kinds of samples begin with the event's id, thread and time. */
static struct perf_event_attr attributes(u32 config, u64 more)
{
	struct perf_event_attr a = {.type = PERF_TYPE_SOFTWARE, .config = config, .use_clockid = 1, .clockid = CLOCK_MONOTONIC};

	a.sample_type = PERF_SAMPLE_IDENTIFIER | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | more;
	a.sample_regs_user = REGISTERS;
	a.sample_stack_user = SAMPLE_STACK_BYTES;
	a.exclude_callchain_user = 1;
	a.sample_id_all = 1;
	a.watermark = 1;
	a.wakeup_watermark = SHARE_BYTES / 2;
	return a;
}

/* The samples of a CPU, which its buffer belongs to. */
static int open_samples(u32 cpu)
{
	struct perf_event_attr a = attributes(PERF_COUNT_SW_CPU_CLOCK, PERF_SAMPLE_CALLCHAIN | PERF_SAMPLE_REGS_USER | PERF_SAMPLE_STACK_USER);
	int fd;

	a.freq = 1;
	a.sample_freq = hz;
	a.mmap = a.mmap2 = a.comm = a.comm_exec = a.task = a.build_id = 1;
	fd = connect_event(&a, cpu, "stack_sample");
	if (fd < 0) { /* before Linux 5.12: a reader knows the files by their inodes alone */
		a.build_id = 0;
		fd = connect_event(&a, cpu, "stack_sample");
	}
	if (fd < 0)
		fail("--stacks: samples of CPU %u cannot be had: %s", cpu, strerror(errno));
	return fd;
}

static void open_sent(u32 cpu, int samples_fd)
{
	struct perf_event_attr a = attributes(PERF_COUNT_SW_BPF_OUTPUT, PERF_SAMPLE_RAW);
	int fd;

	a.sample_period = 1;
	fd = open_event(&a, -1, cpu);
	if (fd < 0 || ioctl(fd, PERF_EVENT_IOC_SET_OUTPUT, samples_fd))
		fail("--stacks: the buffer of CPU %u cannot be shared: %s", cpu, strerror(errno));
	set_map("stacks", &cpu, &fd);
}

static void attach_waits(void)
{
	has_waits = choice->programs_fd < 0 && has_thread_registers();
	if (!has_waits)
		warn("stacks of waits are not recorded, samples alone: they need Linux 5.15, its BTF, and --loader libbpf");
	else if (attach_tracepoint("stack_wait", "sched", "sched_switch") < 0 || attach_tracepoint("stack_waker", "sched", "sched_waking") < 0)
		warn("stacks of waits cannot be had: %s", strerror(errno));
}

void stacks_begin(const struct choice *chosen)
{
	json_t *programs = json_pack("{si si si}", "stack_sample", -1, "stack_wait", -1, "stack_waker", -1);
	int numbers[MOST_CPUS];
	size_t page = sysconf(_SC_PAGESIZE);

	choice = chosen;
	hz = choice->stacks_hz;
	began = time(NULL);
	if (!hz)
		return;
	load_more(programs);
	json_decref(programs);
	cpu_count = online(numbers);
	cpus = calloc(cpu_count, sizeof(*cpus));
	turned = malloc(UINT16_MAX + 1);
	for (int i = 0; i < cpu_count; i++) {
		int fd = open_samples(numbers[i]);

		ioctl(fd, PERF_EVENT_IOC_ID, &cpus[i].clock_id);
		cpus[i].fd = fd;
		cpus[i].page = mapped(fd, page + SHARE_BYTES, PROT_READ | PROT_WRITE);
		cpus[i].data = (const u8 *)cpus[i].page + page;
		open_sent(numbers[i], fd);
		wake_on(fd, false);
	}
	attach_waits();
}

/* Between two changes of levels, for --max-overhead. */
void stacks_pause(bool paused)
{
	for (int i = 0; i < cpu_count; i++)
		ioctl(cpus[i].fd, paused ? PERF_EVENT_IOC_DISABLE : PERF_EVENT_IOC_ENABLE, 0);
}

/* Notes where this turn ends: what belongs to processes that begin later is taken in the next one, when they are known. */
void stacks_mark(void)
{
	for (int i = 0; i < cpu_count; i++)
		cpus[i].head = __atomic_load_n(&cpus[i].page->data_head, __ATOMIC_ACQUIRE);
}

static void note_kernel_place(u64 address)
{
	u32 at = (address * 0x9E3779B97F4A7C15ULL) >> 48;

	for (int i = 0; i < 16; i++, at = (at + 1) % MOST_KERNEL_PLACES) {
		if (!kernel_places[at])
			kernel_places[at] = address;
		if (kernel_places[at] == address)
			return;
	}
}

/* A sample of the clock: header, id, pid, tid, time, number of callers, callers, registers, stack. */
static void note_callers(const struct perf_event_header *header)
{
	const u64 *words = (const u64 *)(header + 1);
	u64 callers = words[3], most = header->size / sizeof(u64) - 5;

	for (u64 i = 0; i < callers && i < most; i++)
		if (words[4 + i] >= FIRST_OF_KERNEL && words[4 + i] < FIRST_MARK)
			note_kernel_place(words[4 + i]);
	samples++;
}

/* Whether a record is written: samples are the target's already; others name every process of the machine. */
static bool is_wanted(const struct perf_event_header *header)
{
	u32 pid = *(const u32 *)(header + 1);

	switch (header->type) {
	case PERF_RECORD_MMAP2:
	case PERF_RECORD_COMM:
		return has_process(pid);
	case PERF_RECORD_FORK:
		return has_process(pid) && pid != ((const u32 *)(header + 1))[1];
	default:
		return false;
	}
}

/* A record in one piece. */
static const struct perf_event_header *record_at(const struct cpu *cpu, u64 position)
{
	u64 at = position % SHARE_BYTES, whole = SHARE_BYTES - at;
	const struct perf_event_header *header = (const void *)(cpu->data + at); /* records begin at multiples of eight bytes */

	if (header->size <= whole)
		return header;
	memcpy(turned, header, whole);
	memcpy(turned + whole, cpu->data, header->size - whole);
	return (const void *)turned;
}

static struct image *image_of(u32 tid)
{
	struct image *image = &images[tid % MOST_STACKS];

	if (image->tid != tid) {
		image->tid = tid;
		image->bytes = image->age = 0;
		image->data = image->data ? image->data : malloc(IMAGE_BYTES);
	}
	return image;
}

/* Whether a stack at these addresses can continue the image: what little is above it is left out. */
static bool continues(struct image *image, u64 at, u64 *bytes)
{
	u64 top = at + *bytes;

	if (!image->bytes || ++image->age % WHOLE_EVERY == 0 || top > image->top + MOST_LEFT_OUT || at >= image->top ||
	    image->top - at > IMAGE_BYTES || top <= image->top - image->bytes)
		return false;
	*bytes = top > image->top ? image->top - at : *bytes;
	return true;
}

/* How many of a stack's bytes differ from the image, up to the address from which on both are equal; `bytes`: of both kinds. */
static u64 new_bytes(struct image *image, u64 at, const u8 *data, u64 *bytes)
{
	u64 same = 0, top;

	if (continues(image, at, bytes)) {
		const u8 *there = image->data + IMAGE_BYTES - (image->top - at); /* where the image has the address `at` */
		const u8 *first = image->data + IMAGE_BYTES - image->bytes;

		while (same + WORD <= *bytes && there + *bytes - same - WORD >= first &&
		       !memcmp(data + *bytes - same - WORD, there + *bytes - same - WORD, WORD))
			same += WORD;
	}
	top = same ? image->top : at + *bytes;
	image->top = top;
	image->bytes = top - at;
	memcpy(image->data + IMAGE_BYTES - image->bytes, data, *bytes - same);
	return *bytes - same;
}

/*
 * A sample of the clock, whose stack ends with the bytes that are new: behind their number stands, in the place of the kernel's
 * number of those copied, how many more are as in the thread's record before.
 */
static void keep_sample(const struct perf_event_header *header)
{
	const u64 *words = (const u64 *)(header + 1), *registers = words + 4 + words[3];
	u64 count = *registers ? __builtin_popcountll(REGISTERS) : 0, bytes, kept;
	const u64 *size = registers + 1 + count;
	const u8 *data = (const u8 *)(size + 1);
	struct perf_event_header head = *header;

	note_callers(header);
	if (!*size) {
		keep_stacks((const u8 *)header, header->size);
		return;
	}
	bytes = *(const u64 *)(data + *size) & ~(u64)(WORD - 1);
	kept = new_bytes(image_of(words[1] >> 32), registers[1 + STACK_REGISTER], data, &bytes);
	head.size = data - (const u8 *)header + kept + sizeof(u64);
	keep_stacks((const u8 *)&head, sizeof(head));
	keep_stacks((const u8 *)words, (const u8 *)size - (const u8 *)words);
	keep_stacks((const u8 *)&kept, sizeof(kept));
	keep_stacks(data, kept);
	keep_stacks((const u8 *)&(u64){bytes - kept}, sizeof(u64));
}

/* What a program sent, likewise: number of new bytes, number of those as before, the new ones. */
static void keep_sent(const struct perf_event_header *header)
{
	const u8 *sent = (const u8 *)header + sizeof(*header) + SENT_AT;
	struct perf_event_header head = *header;
	struct stack_copy copy;
	size_t fixed = offsetof(struct stack_copy, stack);
	u64 bytes, kept;
	u32 size;

	memcpy(&copy, sent, fixed);
	if (copy.reason == STACK_RETURNS || !copy.bytes) {
		keep_stacks((const u8 *)header, header->size);
		return;
	}
	bytes = copy.bytes & ~(u64)(WORD - 1);
	sent_count++;
	kept = new_bytes(image_of(copy.of), copy.registers[STACK_WORD], sent + fixed, &bytes);
	copy.bytes = kept;
	copy.same = bytes - kept;
	head.size = (sizeof(head) + SENT_AT + fixed + kept + WORD - 1) / WORD * WORD;
	size = head.size - sizeof(head) - SENT_AT;
	keep_stacks((const u8 *)&head, sizeof(head));
	keep_stacks((const u8 *)(header + 1), SENT_AT - sizeof(size));
	keep_stacks((const u8 *)&size, sizeof(size));
	keep_stacks((const u8 *)&copy, fixed);
	keep_stacks(sent + fixed, size - fixed); /* up to a multiple of words; the kernel's record has them, too */
}

static void take_from(struct cpu *cpu)
{
	u64 tail = cpu->page->data_tail;

	while (tail < cpu->head) {
		const struct perf_event_header *header = record_at(cpu, tail);

		if (header->type == PERF_RECORD_LOST)
			cpu->lost += ((const u64 *)(header + 1))[1];
		else if (header->type == PERF_RECORD_SAMPLE && ((const u64 *)(header + 1))[0] == cpu->clock_id)
			keep_sample(header);
		else if (header->type == PERF_RECORD_SAMPLE)
			keep_sent(header);
		else if (is_wanted(header))
			keep_stacks((const u8 *)header, header->size);
		tail += header->size;
	}
	__atomic_store_n(&cpu->page->data_tail, tail, __ATOMIC_RELEASE);
}

void stacks_turn(void)
{
	for (int i = 0; i < cpu_count; i++)
		take_from(&cpus[i]);
}

static void keep_mapping(const struct mapping *m, void *context)
{
	struct {
		struct perf_event_header header;
		u32 pid, tid;
		u64 address, bytes, offset;
		u32 major, minor;
		u64 inode, generation;
		u32 access, flags;
		char path[PATH_MOST + 8];
	} record = {.address = m->start, .bytes = m->end - m->start, .offset = m->offset, .major = m->major, .minor = m->minor,
		    .inode = m->inode, .access = PROT_READ | PROT_EXEC};
	pid_t pid = *(const pid_t *)context;
	size_t length = (strlen(m->path) / 8 + 1) * 8;
	struct {
		u32 pid, tid;
		u64 time, id;
	} end = {pid, pid, now_ns(), 0};

	if (!m->is_code)
		return;
	record.pid = record.tid = pid;
	strcpy(record.path, m->path);
	record.header = (struct perf_event_header){PERF_RECORD_MMAP2, PERF_RECORD_MISC_USER,
						   offsetof(typeof(record), path) + length + sizeof(end)};
	keep_stacks((const u8 *)&record, record.header.size - sizeof(end));
	keep_stacks((const u8 *)&end, sizeof(end));
}

void keep_mappings(pid_t pid)
{
	if (hz)
		each_mapping(pid, keep_mapping, &pid);
}

/* The kernel's library in every process, which is in no file, beside the recording. */
static void keep_vdso(void)
{
	const u8 *vdso = (const u8 *)getauxval(AT_SYSINFO_EHDR);
	const Elf64_Ehdr *header = (const void *)vdso;
	char path[PATH_MOST];
	int fd;

	if (!vdso)
		return;
	snprintf(path, sizeof(path), "%s/vdso.so", choice->folder);
	act_as_caller(true);
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	act_as_caller(false);
	if (fd < 0)
		return;
	if (write(fd, vdso, header->e_shoff + header->e_shnum * header->e_shentsize) < 0)
		warn("cannot write %s: %s", path, strerror(errno));
	close(fd);
}

static int by_value(const void *a, const void *b)
{
	u64 first = *(const u64 *)a, second = *(const u64 *)b;

	return (first > second) - (first < second);
}

struct symbol {
	u64 address;
	char name[80];
};

static struct symbol *kernel_symbols(size_t *count)
{
	FILE *file = fopen("/proc/kallsyms", "re");
	struct symbol *symbols = NULL, s;
	char line[512], type;
	size_t room = 0;

	*count = 0;
	while (file && fgets(line, sizeof(line), file)) {
		if (sscanf(line, "%lx %c %79s", &s.address, &type, s.name) != 3 || !strchr("tTwW", type) || !s.address)
			continue;
		if (*count == room) {
			room = room ? 2 * room : 1 << 17;
			symbols = realloc(symbols, room * sizeof(*symbols));
		}
		symbols[(*count)++] = s;
	}
	if (file)
		fclose(file);
	if (symbols)
		qsort(symbols, *count, sizeof(*symbols), by_value);
	return symbols;
}

/* Address of the kernel, in hexadecimal → function. */
static json_t *kernel_names(void)
{
	size_t count, at = 0;
	struct symbol *symbols = kernel_symbols(&count);
	json_t *names = json_object();
	char text[20];

	qsort(kernel_places, MOST_KERNEL_PLACES, sizeof(u64), by_value);
	for (int i = 0; i < MOST_KERNEL_PLACES && count; i++) {
		if (!kernel_places[i])
			continue;
		while (at + 1 < count && symbols[at + 1].address <= kernel_places[i])
			at++;
		snprintf(text, sizeof(text), "%llx", (unsigned long long)kernel_places[i]);
		if (symbols[at].address <= kernel_places[i])
			json_object_set_new(names, text, json_string(symbols[at].name));
	}
	free(symbols);
	return names;
}

void stacks_end(void)
{
	stacks_mark();
	stacks_turn();
	if (!hz)
		return;
	keep_vdso();
	keep_code_maps(choice->folder, choice->pid ? 0 : began);
}

/* The manifest's key `stacks`; null without. */
json_t *stacks(bool whole)
{
	json_t *ids = json_array();
	u64 lost = 0;

	if (!hz)
		return json_null();
	for (int i = 0; i < cpu_count; i++)
		lost += cpus[i].lost;
	for (int i = 0; i < cpu_count; i++)
		json_array_append_new(ids, json_integer(cpus[i].clock_id));
	return json_pack("{si sI si si si sI sI so sI so}", "format", STACKS_FORMAT, "head_bytes", (json_int_t)offsetof(struct stack_copy, stack), "hz", hz, "long_wait_us", has_waits ? (int)(choice->long_wait_s * 1e6) : 0, "copied_bytes", SAMPLE_STACK_BYTES, "samples",
			 (json_int_t)samples, "sent", (json_int_t)sent_count, "clock_ids", ids, "lost", (json_int_t)lost, "kernel", whole ? kernel_names() : json_object());
}
