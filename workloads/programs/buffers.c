/* The recorder's readers of buffers (tracer/recorder/ring.c, perf.c) behind plain calls, over files that pose as the kernel's. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "buffers.h"

static int file, opened;
static json_int_t sum;
static json_t nothing;

int map_fd(const char *name)
{
	(void)name;
	return file;
}

/* The first CPU's buffer is the file; the others have empty ones. */
int open_event(struct perf_event_attr *attributes, pid_t tid, int cpu)
{
	int empty = memfd_create("perf", 0);

	(void)attributes, (void)tid, (void)cpu;
	if (ftruncate(empty, 2 * sysconf(_SC_PAGESIZE)))
		abort();
	return opened++ ? empty : dup(file);
}

void set_map(const char *name, const void *key, const void *value)
{
	(void)name, (void)key, (void)value;
}

void fail(const char *format, ...)
{
	(void)format;
	abort();
}

json_t *json_object(void)
{
	sum = 0;
	return &nothing;
}

json_t *json_integer(json_int_t value)
{
	sum += value;
	return &nothing;
}

int json_object_set_new(json_t *object, const char *key, json_t *value)
{
	(void)object, (void)key, (void)value;
	return 0;
}

struct buffer *open_buffer(int fd, bool perf, size_t slot, u64 bytes)
{
	file = fd;
	opened = 0;
	return (perf ? open_perf : open_ring)("events", slot, perf ? bytes * sysconf(_SC_NPROCESSORS_ONLN) : bytes);
}

const u8 *take_from_buffer(struct buffer *buffer, u64 *bytes)
{
	return buffer->take(buffer, bytes);
}

void release_to_buffer(struct buffer *buffer, u64 bytes)
{
	buffer->release(buffer, bytes);
}

u64 lost_of_buffer(struct buffer *buffer)
{
	buffer->lost(buffer);
	return sum;
}
