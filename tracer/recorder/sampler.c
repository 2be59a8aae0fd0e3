// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Threads that read slow files at their own rates, so that none delays the drain or another. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "recorder.h"

#define MOST_SAMPLERS 64
#define JOIN_S 2
#define LARGEST_FILE (1 << 16)

static struct sampler *samplers[MOST_SAMPLERS];
static int count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ending;
static bool is_ending;

/* With root's rights below the kernel's own /sys alone: another folder is one that the user names. */
int open_sensor(const char *path, bool of_user)
{
	return !of_user && !getuid() ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : open_as_user(path, LARGEST_FILE);
}

/* In the same descriptor, so that its thread never reads another's file. */
void open_sensor_again(const char *path, bool of_user, int *fd)
{
	int fresh = open_sensor(path, of_user);

	if (fresh >= 0 && *fd < 0)
		*fd = fresh;
	else if (fresh >= 0 && dup3(fresh, *fd, O_CLOEXEC) >= 0)
		close(fresh);
}

ssize_t sensor_text(int fd, char *text, size_t bytes)
{
	ssize_t length = fd < 0 ? -1 : pread(fd, text, bytes - 1, 0);

	text[length > 0 ? length : 0] = 0;
	return length;
}

bool sensor_number(int fd, s64 *number)
{
	char text[64];

	return sensor_text(fd, text, sizeof(text)) > 0 && number_from(text, number);
}

bool number_from(const char *text, s64 *number)
{
	char *end;

	errno = 0;
	*number = strtoll(text, &end, 10);
	return end != text && (!*end || *end == '\n') && !errno;
}

static u64 thread_cpu_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return now.tv_sec * NS_PER_S + now.tv_nsec;
}

static bool wait_until(u64 due)
{
	struct timespec when = {due / NS_PER_S, due % NS_PER_S};
	bool ends;

	pthread_mutex_lock(&lock);
	while (!is_ending && pthread_cond_timedwait(&ending, &lock, &when) != ETIMEDOUT)
		;
	ends = is_ending;
	pthread_mutex_unlock(&lock);
	return ends;
}

/* Reads until the end, and a last time then. What a round costs, its wake-up included, bounds the rate. */
static void *take_samples(void *context)
{
	struct sampler *s = context;
	u64 due = now_ns(), pause, now, rounds = 0;

	for (bool ends = false; !ends;) {
		s->read(s);
		s->cpu_ns = thread_cpu_ns();
		pause = s->cpu_ns / ++rounds * s->least_pause;
		pause = pause < s->period_ns ? s->period_ns : pause;
		now = now_ns();
		due += pause;
		if (due < now)
			due += (now - due) / pause * pause + pause;
		ends = wait_until(due);
	}
	return NULL;
}

void start_sampler(struct sampler *s)
{
	pthread_condattr_t monotonic;
	sigset_t every, before;

	if (!count) {
		pthread_condattr_init(&monotonic);
		pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
		pthread_cond_init(&ending, &monotonic);
	}
	sigfillset(&every);
	pthread_sigmask(SIG_SETMASK, &every, &before);
	if (count == MOST_SAMPLERS || pthread_create(&s->thread, NULL, take_samples, s))
		fail("no thread to read %s", s->name);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	samplers[count++] = s;
}

/* A thread that hangs in a read is left to the end of the process. */
void end_samplers(void)
{
	struct timespec limit;

	pthread_mutex_lock(&lock);
	is_ending = true;
	if (count)
		pthread_cond_broadcast(&ending);
	pthread_mutex_unlock(&lock);
	clock_gettime(CLOCK_REALTIME, &limit);
	limit.tv_sec += JOIN_S;
	for (int i = 0; i < count; i++)
		pthread_timedjoin_np(samplers[i]->thread, NULL, &limit);
}
