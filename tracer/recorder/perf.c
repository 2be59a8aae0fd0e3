// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Perf buffers, one per CPU, for kernels without BPF ring buffers (before 5.8). Samples are copied into slots as a ring has them. */
#include <errno.h>
#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "buffers.h"

#define RAW_OFFSET 12 /* of a sample's bytes: struct perf_event_header, u32 size */
#define LOST_COUNT 16 /* in a record of losses: header, u64 id, u64 lost */

struct cpu {
	int number;
	struct perf_event_mmap_page *page;
	const u8 *data;
	u64 lost;
};

struct perf {
	struct buffer buffer;
	int fds[MOST_CPUS];
	struct cpu cpus[MOST_CPUS];
	u64 share; /* bytes per CPU, a power of two */
	u8 *slots;
	u64 filled, room;
};

int online(int *cpus)
{
	FILE *file = fopen("/sys/devices/system/cpu/online", "re");
	int count = 0, first, last;

	while (file && fscanf(file, "%d", &first) == 1) {
		if (fscanf(file, "-%d", &last) != 1)
			last = first;
		while (first <= last && count < MOST_CPUS)
			cpus[count++] = first++;
		if (getc(file) != ',')
			break;
	}
	if (file)
		fclose(file);
	if (!count)
		fail("/sys/devices/system/cpu/online cannot be read: perf buffers need the numbers of the CPUs");
	return count;
}

/* An event to which programs write on one CPU, entered into the map; wakes its reader after `wakeup_bytes`, 0: at every record. */
static int open_output(const char *map, u32 cpu, u32 wakeup_bytes)
{
	struct perf_event_attr attributes = {.type = PERF_TYPE_SOFTWARE, .config = PERF_COUNT_SW_BPF_OUTPUT, .sample_period = 1};
	int fd;

	attributes.sample_type = PERF_SAMPLE_RAW;
	attributes.watermark = wakeup_bytes > 0;
	attributes.wakeup_events = wakeup_bytes ? wakeup_bytes : 1;
	fd = open_event(&attributes, -1, cpu);
	if (fd < 0)
		fail("cannot open a perf buffer on CPU %u: %s", cpu, strerror(errno));
	set_map(map, &cpu, &fd);
	return fd;
}

void *mapped(int fd, u64 bytes, int access)
{
	void *memory = mmap(NULL, bytes, access, MAP_SHARED, fd, 0);

	if (memory == MAP_FAILED)
		fail("cannot map a perf buffer of %llu KiB: %s; give a smaller --ring-mib, or raise /proc/sys/kernel/perf_event_mlock_kb",
		     (unsigned long long)bytes >> 10, strerror(errno));
	return memory;
}

/* Copies bytes that may continue at the buffer's begin. */
static void copy(const struct perf *p, const struct cpu *cpu, u64 position, void *to, u64 bytes)
{
	u64 at = position % p->share, whole = p->share - at < bytes ? p->share - at : bytes;

	memcpy(to, cpu->data + at, whole);
	memcpy((u8 *)to + whole, cpu->data, bytes - whole);
}

static void add_slot(struct perf *p, const struct cpu *cpu, u64 position)
{
	u32 record = p->buffer.slot - HEADER_BYTES, header[2] = {record, 0};
	u8 *slot = p->slots + p->filled;

	memcpy(slot, header, sizeof(header));
	copy(p, cpu, position + RAW_OFFSET, slot + HEADER_BYTES, record);
	p->filled += p->buffer.slot;
}

static void make_room(struct perf *p, u64 bytes)
{
	if (p->filled + bytes <= p->room)
		return;
	p->room = p->filled + bytes;
	p->slots = realloc(p->slots, p->room);
	if (!p->slots)
		fail("out of memory: %llu MB of records wait to be written", (unsigned long long)p->room / 1000000);
}

/* Copies all that one CPU wrote, and returns the space to the kernel. */
static void take_from(struct perf *p, struct cpu *cpu)
{
	u64 tail = cpu->page->data_tail, head = __atomic_load_n(&cpu->page->data_head, __ATOMIC_ACQUIRE), lost;
	u16 sample = (RAW_OFFSET + p->buffer.slot - HEADER_BYTES + 7) / 8 * 8;

	make_room(p, head - tail); /* a sample is not smaller than its slot */
	while (tail < head) {
		struct perf_event_header header;

		copy(p, cpu, tail, &header, sizeof(header));
		if (header.type == PERF_RECORD_SAMPLE && header.size == sample)
			add_slot(p, cpu, tail);
		if (header.type == PERF_RECORD_LOST) {
			copy(p, cpu, tail + LOST_COUNT, &lost, sizeof(lost));
			cpu->lost += lost;
		}
		tail += header.size > sizeof(header) ? header.size : sizeof(header);
	}
	__atomic_store_n(&cpu->page->data_tail, tail, __ATOMIC_RELEASE);
}

static const u8 *take(struct buffer *buffer, u64 *bytes)
{
	struct perf *p = (void *)buffer;

	for (int i = 0; i < buffer->fd_count; i++)
		take_from(p, &p->cpus[i]);
	*bytes = p->filled;
	return p->slots;
}

static void release(struct buffer *buffer, u64 bytes)
{
	struct perf *p = (void *)buffer;

	p->filled -= bytes;
	memmove(p->slots, p->slots + bytes, p->filled);
}

/* Each loss is told with the next record that fits. */
static json_t *lost(const struct buffer *buffer)
{
	const struct perf *p = (const void *)buffer;
	json_t *answer = json_object();
	char number[16];

	for (int i = 0; i < buffer->fd_count; i++) {
		snprintf(number, sizeof(number), "%d", p->cpus[i].number);
		if (p->cpus[i].lost)
			json_object_set_new(answer, number, json_integer(p->cpus[i].lost));
	}
	return answer;
}

/* The largest power of two that is not above a CPU's part of all the bytes; at least a page. */
static u64 share_of(u64 bytes, int cpus)
{
	u64 share = sysconf(_SC_PAGESIZE);

	while (2 * share <= bytes / cpus)
		share *= 2;
	return share;
}

struct buffer *open_perf(const char *map, size_t slot, u64 bytes)
{
	struct perf *p = calloc(1, sizeof(*p));
	int numbers[MOST_CPUS], count = online(numbers);
	size_t page = sysconf(_SC_PAGESIZE);

	p->share = share_of(bytes, count);
	for (int i = 0; i < count; i++) {
		struct cpu *cpu = &p->cpus[i];

		cpu->number = numbers[i];
		p->fds[i] = open_output(map, numbers[i], p->share / 2);
		cpu->page = mapped(p->fds[i], page + p->share, PROT_READ | PROT_WRITE);
		cpu->data = (const u8 *)cpu->page + page;
	}
	p->buffer = (struct buffer){p->share * count, slot, p->fds, count, take, release, lost};
	return &p->buffer;
}

/* Its buffers are overwritten and never read. */
int open_doorbell(const int **fds)
{
	static int bells[MOST_CPUS];
	int numbers[MOST_CPUS], count = online(numbers);

	for (int i = 0; i < count; i++) {
		bells[i] = open_output("doorbell", numbers[i], 0);
		mapped(bells[i], 2 * sysconf(_SC_PAGESIZE), PROT_READ);
	}
	*fds = bells;
	return count;
}
