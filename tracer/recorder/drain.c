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
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "buffers.h"
#include "slow_steps.h"

#define SEGMENT_BYTES (1ULL << 20)
#define MOST_PICKED 4096 /* per turn; records that the target waits on come one at a time */
#define QUICK_NS 20000000ULL
#define SLOW_NS NS_PER_S
#define BUSY_PART 4 /* of a ring, filled since the last turn */
#define IDLE_PART 64
#define LAG_NS 20000000ULL /* by then, records that another CPU was still writing have arrived */

struct ring {
	const char *name;
	size_t slot;
	struct buffer *buffer;
	u64 taken, end, sealed;
	int file, sums;
	XXH3_state_t *hash;
};

static struct ring rings[] = {{.name = "events", .slot = EVENT_SLOT},
			      {.name = "details", .slot = DETAIL_SLOT}};
static struct ring stack_file = {.name = "stacks"}; /* whose records come from elsewhere */
#define RINGS (sizeof(rings) / sizeof(*rings))

static struct drained sums;
static const u8 *picked[MOST_PICKED];
static u8 copies[MOST_PICKED][DETAIL_BYTES];
static u64 pace_ns = QUICK_NS;
static int poller, write_error;
static bool pairs_steps, counts_misses, filters;
static struct step_tracker steps;
static struct misses misses;
static struct sieve slow_only;

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

static void wake_on_all(const int *fds, int count)
{
	for (int i = 0; i < count; i++)
		wake_on(fds[i], false);
}

static void watch_steps(const struct choice *choice)
{
	filters = choice->only_slower_s > 0;
	counts_misses = choice->min_tps > 0;
	pairs_steps = filters || counts_misses || choice->max_overhead > 0;
	begin_sieve(&slow_only, &steps, choice->only_slower_s * NS_PER_S + 0.5, MOST_HELD_BYTES);
}

static void create_files(struct ring *r, const char *folder)
{
	r->file = create(folder, r->name, "bin");
	r->sums = create(folder, r->name, "sum");
	r->hash = XXH3_createState();
	XXH3_64bits_reset(r->hash);
}

void open_rings(const struct choice *choice)
{
	const int *bells;

	watch_steps(choice);
	poller = epoll_create1(EPOLL_CLOEXEC);
	if (choice->perf) {
		int count = open_doorbell(&bells);

		wake_on_all(bells, count);
	}
	for (size_t i = 0; i < RINGS; i++) {
		struct ring *r = &rings[i];

		r->buffer = (choice->perf ? open_perf : open_ring)(r->name, r->slot, choice->ring_bytes);
		wake_on_all(r->buffer->fds, r->buffer->fd_count);
		create_files(r, choice->folder);
	}
	if (choice->stacks_hz)
		create_files(&stack_file, choice->folder);
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
	if (stack_file.hash)
		seal_one(&stack_file);
}

bool disk_failed(void)
{
	return write_error;
}

const struct drained *drained(void)
{
	return &sums;
}

const struct steps *finished_steps(void)
{
	return &steps.finished;
}

struct misses *seen_misses(void)
{
	return &misses;
}

const struct sieve *sieve(void)
{
	return filters ? &slow_only : NULL;
}

json_t *lost_by_cpu(void)
{
	json_t *answer = json_object();

	for (size_t i = 0; i < RINGS; i++) {
		json_t *row = rings[i].buffer->lost(rings[i].buffer);

		if (json_object_size(row))
			json_object_set(answer, rings[i].name, row);
		json_decref(row);
	}
	return answer;
}

/* Counts the steps of a batch and copies the wanted records; returns how many are picked now. */
static int look_through(struct ring *r, const u8 *first, const bool *wanted, int count)
{
	for (u64 at = 0; at < r->taken; at += r->slot) {
		u8 kind = header_of(first + at)->kind;

		sums.records[kind] += !filters;
		sums.steps += kind == KIND_TOKEN_END;
		sums.decode_steps += kind == KIND_TOKEN_BEGIN && is_decode(header_of(first + at));
		if (!wanted[kind])
			continue;
		if (count == MOST_PICKED) { /* the others stay in the ring until the next turn */
			sums.records[kind] -= !filters;
			r->taken = at;
			break;
		}
		memcpy(copies[count], first + at + HEADER_BYTES, r->slot - HEADER_BYTES);
		picked[count] = copies[count];
		count++;
	}
	return count;
}

static void keep(struct ring *r, const u8 *first, size_t bytes)
{
	if (write_error || !bytes)
		return;
	if (!write_all(r->file, first, bytes)) {
		write_error = errno ? errno : ENOSPC;
		warn("cannot write %s.bin: %s; everything written before is readable", r->name, strerror(write_error));
		return;
	}
	XXH3_64bits_update(r->hash, first, bytes);
	r->end += bytes;
	sums.bytes += bytes;
	if (r->end - r->sealed >= SEGMENT_BYTES)
		seal_one(r);
}

void keep_stacks(const u8 *record, size_t bytes)
{
	keep(&stack_file, record, bytes);
}

/* Appends a record of the recorder's own to the events. */
void add_event(const struct header *record)
{
	u8 slot[EVENT_BYTES + HEADER_BYTES] = {EVENT_BYTES};

	memcpy(slot + HEADER_BYTES, record, EVENT_BYTES);
	sums.records[record->kind]++;
	sums.seen++;
	keep(&rings[0], slot, sizeof(slot));
}

/* Adds a batch of events to what is known of steps. */
static void learn_from(const u8 *events, size_t bytes, bool last)
{
	u64 until = now_ns() - (last ? 0 : LAG_NS);

	read_steps(&steps, events, bytes, until);
	if (counts_misses)
		read_misses(&misses, events, bytes);
	if (filters)
		learn_steps(&slow_only, until, last);
}

/* Writes a batch; if only slow steps are kept, what is due of it and of earlier ones. */
static void keep_wanted(struct ring *r, const u8 *first)
{
	size_t bytes = r->taken;

	if (filters)
		first = slow_slots(&slow_only, r - rings, r->slot, first, &bytes);
	for (size_t at = 0; filters && at < bytes; at += r->slot)
		sums.records[(u8)header_of(first + at)->kind]++;
	keep(r, first, bytes);
}

static int by_time(const void *a, const void *b)
{
	u64 first = (*(const struct header *const *)a)->ts, second = (*(const struct header *const *)b)->ts;

	return (first > second) - (first < second);
}

/* Sets how long to sleep from now on: short while the rings fill, longer while they do not. */
static void set_pace(u64 part)
{
	u64 size = rings[0].buffer->bytes;

	if (part > size / BUSY_PART)
		pace_ns = pace_ns / 2 > QUICK_NS / 8 ? pace_ns / 2 : QUICK_NS / 8;
	else if (part < size / IDLE_PART)
		pace_ns = pace_ns < QUICK_NS ? QUICK_NS : pace_ns * 2 < SLOW_NS ? pace_ns * 2 : SLOW_NS;
	else if (pace_ns > QUICK_NS)
		pace_ns = QUICK_NS;
}

int drain_turn(const bool *wanted, const u8 ***out, bool last)
{
	u64 largest = 0;
	int count = 0;

	for (size_t i = 0; i < RINGS; i++) {
		struct ring *r = &rings[i];
		const u8 *first = r->buffer->take(r->buffer, &r->taken);

		count = look_through(r, first, wanted, count);
		if (pairs_steps && r == &rings[0])
			learn_from(first, r->taken, last);
		keep_wanted(r, first);
		sums.seen += r->taken / r->slot;
		largest = r->taken > largest ? r->taken : largest;
		r->buffer->release(r->buffer, r->taken);
	}
	set_pace(largest);
	qsort(picked, count, sizeof(*picked), by_time);
	*out = picked;
	return count;
}
