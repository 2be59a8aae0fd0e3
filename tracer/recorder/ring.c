// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* A BPF ring buffer in the kernel's memory layout: consumer page, producer page, then the data mapped twice in a row. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "buffers.h"

#define BUSY (1U << 31)

struct ring {
	struct buffer buffer;
	int fd;
	u64 position;
	volatile u64 *consumed;
	const volatile u64 *produced;
	const u8 *data;
};

/* Contiguous in spite of the ring's end, since it is mapped twice. */
static const u8 *take(struct buffer *buffer, u64 *bytes)
{
	struct ring *r = (void *)buffer;
	const u8 *first = r->data + r->position % buffer->bytes;
	u64 most = __atomic_load_n(r->produced, __ATOMIC_ACQUIRE) - r->position;

	for (*bytes = 0; *bytes < most; *bytes += buffer->slot) {
		if (__atomic_load_n((const u32 *)(first + *bytes), __ATOMIC_ACQUIRE) & BUSY)
			break;
	}
	return first;
}

static void release(struct buffer *buffer, u64 bytes)
{
	struct ring *r = (void *)buffer;

	r->position += bytes;
	__atomic_store_n(r->consumed, r->position, __ATOMIC_RELEASE);
}

/* The programs count a ring's losses, by kind. */
static json_t *lost(const struct buffer *buffer)
{
	(void)buffer;
	return json_object();
}

struct buffer *open_ring(const char *map, size_t slot, u64 bytes)
{
	size_t page = sysconf(_SC_PAGESIZE);
	struct ring *r = calloc(1, sizeof(*r));
	u8 *consumer, *producer;

	r->fd = map_fd(map);
	consumer = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, r->fd, 0);
	producer = mmap(NULL, page + 2 * bytes, PROT_READ, MAP_SHARED, r->fd, page);
	if (consumer == MAP_FAILED || producer == MAP_FAILED)
		fail("cannot map the ring %s: %s", map, strerror(errno));
	r->consumed = (void *)consumer;
	r->produced = (void *)producer;
	r->data = producer + page;
	r->buffer = (struct buffer){bytes, slot, &r->fd, 1, take, release, lost};
	return &r->buffer;
}
