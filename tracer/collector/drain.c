// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Moves records from the rings to the files: each turn writes whole batches directly from the rings' memory and returns the few
 * records that are answered. Files, checksums and pace are those of tracer/recording.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "collect.h"

#define HEADER_BYTES 8
#define BUSY (1U << 31)
#define SEGMENT_BYTES (1ULL << 20)
#define MOST_PICKED 4096 /* per turn; records that the target waits on come one at a time */
#define QUICK_NS 20000000ULL
#define SLOW_NS NS_PER_S
#define BUSY_PART 4 /* of a ring, filled since the last turn */
#define IDLE_PART 64

struct ring {
	const char *name;
	size_t slot;
	u64 size, position, taken, end, sealed;
	volatile u64 *consumed;
	const volatile u64 *produced;
	const u8 *data;
	int file, sums;
	XXH3_state_t *hash;
};

static struct ring rings[] = {{.name = "events", .slot = EVENT_BYTES + HEADER_BYTES},
			      {.name = "details", .slot = DETAIL_BYTES + HEADER_BYTES}};
#define RINGS (sizeof(rings) / sizeof(*rings))

static struct drained sums;
static const u8 *picked[MOST_PICKED];
static u8 copies[MOST_PICKED][DETAIL_BYTES];
static u64 pace_ns = QUICK_NS;
static int poller, write_error;

static const struct header *header_of(const u8 *slot)
{
	return (const void *)(slot + HEADER_BYTES);
}

void digest(const void *data, size_t bytes, char *text)
{
	sprintf(text, "%016llx", (unsigned long long)XXH3_64bits(data, bytes));
}

static int create(const char *folder, const char *name, const char *suffix)
{
	char path[PATH_MOST];
	int fd;

	snprintf(path, sizeof(path), "%s/%s.%s", folder, name, suffix);
	act_as_caller(true);
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	act_as_caller(false);
	if (fd < 0)
		fail("cannot write %s: %s", path, strerror(errno));
	return fd;
}

static void map_ring(struct ring *r, int fd, u64 size)
{
	size_t page = sysconf(_SC_PAGESIZE);
	u8 *consumer = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	u8 *producer = mmap(NULL, page + 2 * size, PROT_READ, MAP_SHARED, fd, page);

	if (consumer == MAP_FAILED || producer == MAP_FAILED)
		fail("cannot map the ring %s: %s", r->name, strerror(errno));
	r->size = size;
	r->consumed = (void *)consumer;
	r->produced = (void *)producer;
	r->data = producer + page;
}

void open_rings(const struct choice *choice)
{
	poller = epoll_create1(EPOLL_CLOEXEC);
	for (size_t i = 0; i < RINGS; i++) {
		struct ring *r = &rings[i];
		struct epoll_event event = {.events = EPOLLIN};

		map_ring(r, map_fd(r->name), choice->ring_bytes);
		r->file = create(choice->folder, r->name, "bin");
		r->sums = create(choice->folder, r->name, "sum");
		r->hash = XXH3_createState();
		XXH3_64bits_reset(r->hash);
		epoll_ctl(poller, EPOLL_CTL_ADD, map_fd(r->name), &event);
	}
}

void wake_on(int fd, bool once)
{
	struct epoll_event event = {.events = EPOLLIN | (once ? EPOLLONESHOT : 0)};

	epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

/* Sleeps until records wake us, the next turn is due, or the deadline has passed. */
void sleep_until(u64 deadline_ns)
{
	struct epoll_event event;
	u64 now = now_ns(), left = deadline_ns > now ? deadline_ns - now : 0;

	epoll_wait(poller, &event, 1, ((left < pace_ns ? left : pace_ns) + 999999) / 1000000);
}

static bool write_all(int fd, const u8 *data, size_t bytes)
{
	while (bytes) {
		ssize_t done = write(fd, data, bytes);

		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return false;
		data += done;
		bytes -= done;
	}
	return true;
}

/* Ends a file's segment, if it is not empty, with its checksum; does nothing if the disk is full, which was reported before. */
static void seal_one(struct ring *r)
{
	u64 entry[2] = {r->end, XXH3_64bits_digest(r->hash)};

	if (r->end == r->sealed || write_error || !write_all(r->sums, (u8 *)entry, sizeof(entry)))
		return;
	r->sealed = r->end;
	XXH3_64bits_reset(r->hash);
}

void seal(void)
{
	for (size_t i = 0; i < RINGS; i++)
		seal_one(&rings[i]);
}

bool disk_failed(void)
{
	return write_error;
}

const struct drained *drained(void)
{
	return &sums;
}

/* The finished records of a ring from its position on; they are contiguous, since the ring is mapped twice in a row. */
static const u8 *take(struct ring *r)
{
	const u8 *first = r->data + r->position % r->size;
	u64 produced = __atomic_load_n(r->produced, __ATOMIC_ACQUIRE), most = produced - r->position;

	for (r->taken = 0; r->taken < most; r->taken += r->slot) {
		if (__atomic_load_n((const u32 *)(first + r->taken), __ATOMIC_ACQUIRE) & BUSY)
			break;
	}
	return first;
}

/* Counts the records of a batch and copies the wanted ones; returns how many are picked now. */
static int look_through(struct ring *r, const u8 *first, const bool *wanted, int count)
{
	for (u64 at = 0; at < r->taken; at += r->slot) {
		u8 kind = header_of(first + at)->kind;

		sums.records[kind]++;
		if (!wanted[kind])
			continue;
		if (count == MOST_PICKED) { /* the others stay in the ring until the next turn */
			sums.records[kind]--;
			r->taken = at;
			break;
		}
		memcpy(copies[count], first + at + HEADER_BYTES, r->slot - HEADER_BYTES);
		picked[count] = copies[count];
		count++;
	}
	return count;
}

static void keep(struct ring *r, const u8 *first)
{
	if (write_error || !r->taken)
		return;
	if (!write_all(r->file, first, r->taken)) {
		write_error = errno ? errno : ENOSPC;
		warn("cannot write %s.bin: %s; everything written before is readable", r->name, strerror(write_error));
		return;
	}
	XXH3_64bits_update(r->hash, first, r->taken);
	r->end += r->taken;
	sums.bytes += r->taken;
	if (r->end - r->sealed >= SEGMENT_BYTES)
		seal_one(r);
}

/* Appends a record of the collector's own to the events. */
void add_event(const struct header *record)
{
	u8 slot[EVENT_BYTES + HEADER_BYTES] = {EVENT_BYTES};
	struct ring *r = &rings[0];

	memcpy(slot + HEADER_BYTES, record, EVENT_BYTES);
	r->taken = sizeof(slot);
	sums.records[record->kind]++;
	sums.seen++;
	keep(r, slot);
}

static int by_time(const void *a, const void *b)
{
	u64 first = (*(const struct header *const *)a)->ts, second = (*(const struct header *const *)b)->ts;

	return (first > second) - (first < second);
}

/* Sets how long to sleep from now on: short while the rings fill, longer while they do not. */
static void set_pace(u64 part)
{
	if (part > rings[0].size / BUSY_PART)
		pace_ns = pace_ns / 2 > QUICK_NS / 8 ? pace_ns / 2 : QUICK_NS / 8;
	else if (part < rings[0].size / IDLE_PART)
		pace_ns = pace_ns < QUICK_NS ? QUICK_NS : pace_ns * 2 < SLOW_NS ? pace_ns * 2 : SLOW_NS;
	else if (pace_ns > QUICK_NS)
		pace_ns = QUICK_NS;
}

int drain_turn(const bool *wanted, const u8 ***out)
{
	u64 largest = 0;
	int count = 0;

	for (size_t i = 0; i < RINGS; i++) {
		struct ring *r = &rings[i];
		const u8 *first = take(r);

		count = look_through(r, first, wanted, count);
		keep(r, first);
		sums.seen += r->taken / r->slot;
		largest = r->taken > largest ? r->taken : largest;
		r->position += r->taken;
		__atomic_store_n(r->consumed, r->position, __ATOMIC_RELEASE);
	}
	set_pace(largest);
	qsort(picked, count, sizeof(*picked), by_time);
	*out = picked;
	return count;
}
