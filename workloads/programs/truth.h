/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the truth programs share: the tracer's clock, work of known length, and a log of what was done.
 *
 * A log row stands for one span. The program reads its clock on both sides of the begin's call and of the end's, so that a
 * record of either must lie between two readings; page faults are the thread's own count, by getrusage, in between.
 * Logs are written to before they are used: they cost no page fault later.
 */
#ifndef TRUTH_H
#define TRUTH_H
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;

#define MAX_ROWS 40000
#define PAGE 4096
#define MAX_PAGES 16384

struct row {
	const char *what;
	int tid;
	s64 id, detail;
	u64 before_begin, after_begin, before_end, after_end;
	s64 min_flt, maj_flt;
};

struct log {
	struct row *rows;
	int used, tid;
	char *fresh; /* pages never touched before */
	int touched;
};

static inline u64 now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static inline void busy_until(u64 end)
{
	while (now() < end)
		;
}

static inline void read_faults(s64 *minor, s64 *major)
{
	struct rusage usage;

	getrusage(RUSAGE_THREAD, &usage);
	*minor = usage.ru_minflt;
	*major = usage.ru_majflt;
}

static inline void *reserve(size_t bytes)
{
	char *place = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (place == MAP_FAILED)
		abort();
	madvise(place, bytes, MADV_NOHUGEPAGE);
	return place;
}

/* A thread's log; called on that thread. */
static inline void log_open(struct log *log)
{
	s64 ignored;

	memset(log, 0, sizeof(*log));
	log->rows = reserve(MAX_ROWS * sizeof(struct row));
	memset(log->rows, 1, MAX_ROWS * sizeof(struct row));
	log->fresh = reserve((size_t)MAX_PAGES * PAGE);
	log->tid = syscall(SYS_gettid);
	now();
	read_faults(&ignored, &ignored);
}

/* Exactly `pages` minor faults. */
static inline void touch(struct log *log, int pages)
{
	for (int i = 0; i < pages; i++)
		log->fresh[(size_t)(log->touched++ % MAX_PAGES) * PAGE] = 1;
}

static inline struct row *row_open(struct log *log, const char *what, s64 id, s64 detail)
{
	struct row *row = &log->rows[log->used++];

	if (log->used == MAX_ROWS)
		abort();
	row->what = what;
	row->tid = log->tid;
	row->id = id;
	row->detail = detail;
	return row;
}

#define BEGIN(row, call)                                                                                               \
	do {                                                                                                           \
		(row)->before_begin = now();                                                                           \
		call;                                                                                                  \
		(row)->after_begin = now();                                                                            \
		read_faults(&(row)->min_flt, &(row)->maj_flt);                                                         \
	} while (0)

#define END(row, call)                                                                                                 \
	do {                                                                                                           \
		s64 minor_, major_;                                                                                    \
		read_faults(&minor_, &major_);                                                                         \
		(row)->min_flt = minor_ - (row)->min_flt;                                                              \
		(row)->maj_flt = major_ - (row)->maj_flt;                                                              \
		(row)->before_end = now();                                                                             \
		call;                                                                                                  \
		(row)->after_end = now();                                                                              \
	} while (0)

static inline void log_write(FILE *out, const struct log *log)
{
	for (int i = 0; i < log->used; i++) {
		const struct row *r = &log->rows[i];

		fprintf(out, "%s,%d,%lld,%lld,%llu,%llu,%llu,%llu,%lld,%lld\n", r->what, r->tid, (long long)r->id,
			(long long)r->detail, (unsigned long long)r->before_begin, (unsigned long long)r->after_begin,
			(unsigned long long)r->before_end, (unsigned long long)r->after_end, (long long)r->min_flt,
			(long long)r->maj_flt);
	}
}

static inline FILE *log_file(const char *path)
{
	FILE *out = fopen(path, "w");

	if (!out)
		abort();
	fprintf(out, "what,tid,id,detail,before_begin,after_begin,before_end,after_end,min_flt,maj_flt\n");
	return out;
}

#endif
