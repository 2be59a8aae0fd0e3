/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What carries a stream of records from the kernel: a ring (ring.c), or perf buffers, one per CPU (perf.c). */
#ifndef MOESCOPE_BUFFERS_H
#define MOESCOPE_BUFFERS_H

#include "recorder.h"


#define MOST_CPUS 4096

int online(int *cpus); /* numbers of the CPUs, MOST_CPUS at most; returns how many */
void *mapped(int fd, u64 bytes, int access); /* a perf event's buffer with its first page; fails if it cannot be mapped */

struct buffer {
	u64 bytes; /* size; perf: of all CPUs together */
	size_t slot; /* bytes of a record with its header */
	const int *fds; /* they wake the reader */
	int fd_count;
	/* The finished records as contiguous slots, `*bytes` of them; valid until `release`. */
	const u8 *(*take)(struct buffer *buffer, u64 *bytes);
	/* Gives up the first `bytes`; the others are taken again. */
	void (*release)(struct buffer *buffer, u64 bytes);
	/* CPU → records lost, as far as the buffer itself reports them */
	json_t *(*lost)(const struct buffer *buffer);
};

struct buffer *open_ring(const char *map, size_t slot, u64 bytes);
struct buffer *open_perf(const char *map, size_t slot, u64 bytes);
/* Events that wake the reader for records that the target waits on; returns how many. */
int open_doorbell(const int **fds);

#endif
