/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causes of lost time that a truth program plants into some of its operators, and the log rows with their true lengths.
 *
 * A plant is KIND:AMOUNT@THREAD, in operators of that thread:
 *   sleep        AMOUNT microseconds asleep; `timer`: while another thread of the program computes on that CPU
 *   stop         the program stops itself, and a child continues it AMOUNT microseconds later
 *   open         opens a file that is named like an engine's library, for which the tracer stops the program
 *   lock         a lock that another thread holds for AMOUNT microseconds while it computes; `rest`: while it sleeps
 *   cold         AMOUNT microseconds, or the page longer that it takes, of reading a file of which no page is in memory
 *   slow         every operator of the thread takes AMOUNT times as long
 *   beside       every operator takes AMOUNT microseconds, and other programs may displace the thread
 * The thread is bound to the first CPU, the other one to the last.
 * Rows: "plant" is one of them, its detail the ns in it that the thread was ready but had no CPU; "delay" is the same of a whole
 * step; "gap" is a time in which a thread that had work had no CPU, by its own clock.
 */
#ifndef PLANTS_H
#define PLANTS_H
#include "truth.h"
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>

#define GAP_NS 30000 /* longer than any interrupt */
#define COLD_PAGES 32768 /* enough where a page takes 4 us, faster than any disk */

static struct {
	char kind[8];
	int amount, thread, touched, stopped[2];
	volatile char *file;
	u64 begun; /* the step */
	cpu_set_t cpus; /* on which the program may run */
	pthread_mutex_t lock;
	sem_t step, wanted, held, taken;
} plant = {.lock = PTHREAD_MUTEX_INITIALIZER, .thread = -1};

static inline int is_planted(const char *kind)
{
	return !strcmp(plant.kind, kind);
}

/* ns in which the calling thread was ready but had no CPU, since it began. */
static inline s64 run_delay(void)
{
	static __thread int fd;
	char text[96] = {0};
	long long ran, delayed;

	if (!fd) {
		snprintf(text, sizeof(text), "/proc/self/task/%d/schedstat", (int)syscall(SYS_gettid));
		fd = open(text, O_RDONLY);
	}
	if (pread(fd, text, sizeof(text) - 1, 0) <= 0 || sscanf(text, "%lld %lld", &ran, &delayed) != 2)
		abort();
	return delayed;
}

static inline void bind_thread(int number)
{
	int first = -1, last = -1;
	cpu_set_t one;

	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &plant.cpus)) {
			first = first < 0 ? cpu : first;
			last = cpu;
		}
	CPU_ZERO(&one);
	CPU_SET(number == plant.thread ? first : last, &one);
	sched_setaffinity(0, sizeof(one), &one);
}

/*
 * Binds the calling thread to the first CPU if it works with the planted one, else to the last. Neighbours on the machine are no part
 * of the experiment, but for `beside`.
 */
static inline void plant_thread(int number)
{
	struct sched_param urgent = {.sched_priority = 1};
	struct rlimit without_rest = {5000000, 5000000};

	if (plant.thread < 0)
		return;
	bind_thread(number);
	if ((!is_planted("beside") || number != plant.thread) && !setrlimit(RLIMIT_RTTIME, &without_rest))
		sched_setscheduler(0, SCHED_FIFO, &urgent);
}

/* Holds the lock but for the moments in which it is taken from it. */
static void *hold_lock(void *ignored)
{
	plant_thread(plant.thread);
	for (;;) {
		pthread_mutex_lock(&plant.lock);
		sem_post(&plant.held);
		sem_wait(&plant.wanted);
		if (is_planted("rest"))
			usleep(plant.amount);
		else
			busy_until(now() + plant.amount * 1000ULL);
		pthread_mutex_unlock(&plant.lock);
		sem_wait(&plant.taken);
	}
	return ignored;
}

/* Computes wherever the planted thread, which is more urgent, leaves its CPU. */
static void *compute_beside(void *ignored)
{
	bind_thread(plant.thread);
	for (;;)
		now();
	return ignored;
}

/* A child that continues the program whenever that has stopped itself, and ends with it. */
static inline void make_continuer(void)
{
	char asked;

	if (pipe(plant.stopped))
		abort();
	if (fork())
		return;
	close(plant.stopped[1]);
	while (read(plant.stopped[0], &asked, 1) == 1) {
		usleep(plant.amount);
		kill(getppid(), SIGCONT);
	}
	_exit(0);
}

static inline void stop_oneself(void)
{
	if (write(plant.stopped[1], "", 1) != 1)
		abort();
	raise(SIGSTOP); /* this thread first */
}

/* None of the file's pages is in memory. */
static inline void make_cold_file(const char *path)
{
	static char pages[64 * PAGE];
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);

	for (int i = 0; i < COLD_PAGES / 64; i++)
		if (write(fd, pages, sizeof(pages)) != sizeof(pages))
			abort();
	fsync(fd);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	plant.file = mmap(NULL, (size_t)COLD_PAGES * PAGE, PROT_READ, MAP_SHARED, fd, 0);
	madvise((void *)plant.file, (size_t)COLD_PAGES * PAGE, MADV_RANDOM);
	close(fd);
}

/* Reads the plant from `text`; `path` names a file that may be made. */
static inline void plant_open(const char *text, const char *path)
{
	pthread_t thread;

	if (sscanf(text, "%7[a-z]:%d@%d", plant.kind, &plant.amount, &plant.thread) != 3)
		abort();
	sched_getaffinity(0, sizeof(plant.cpus), &plant.cpus);
	if (is_planted("cold"))
		make_cold_file(path);
	sem_init(&plant.step, 0, 0);
	sem_init(&plant.wanted, 0, 0);
	sem_init(&plant.held, 0, 0);
	sem_init(&plant.taken, 0, 0);
	if (is_planted("lock") || is_planted("rest"))
		pthread_create(&thread, NULL, hold_lock, NULL);
	if (is_planted("timer"))
		pthread_create(&thread, NULL, compute_beside, NULL);
	if (is_planted("stop"))
		make_continuer();
}

static inline void note_gap(struct log *log, s64 step, u64 begin, u64 end)
{
	struct row *row;

	if (end < begin + GAP_NS)
		return;
	row = row_open(log, "gap", step, 0);
	row->before_begin = row->after_begin = begin;
	row->before_end = row->after_end = end;
}

/* Computes until `end`, or longer by the times that it is displaced where that is planted. */
static inline void compute_until(struct log *log, s64 step, u64 end)
{
	for (u64 last = now(), t = last; t < end; last = t) {
		t = now();
		note_gap(log, step, last, t);
		if (t > last + GAP_NS && is_planted("beside"))
			end += t - last;
	}
}

/* Lets the other thread begin its part of a step. */
static inline void plant_step(void)
{
	plant.begun = now();
	sem_post(&plant.step);
}

/* Waits, asleep, for a step to begin. */
static inline void await_step(struct log *log)
{
	sem_wait(&plant.step);
	note_gap(log, -1, plant.begun, now());
}

/* How long an operator that lasts `ns` elsewhere is to compute on a thread. */
static inline u64 planted_ns(int thread, u64 ns)
{
	if (is_planted("beside"))
		return plant.amount * 1000ULL;
	return ns * (is_planted("slow") && thread == plant.thread ? plant.amount : 1);
}

static inline void take_lock(void)
{
	sem_wait(&plant.held); /* long since */
	sem_post(&plant.wanted);
	pthread_mutex_lock(&plant.lock);
	pthread_mutex_unlock(&plant.lock);
	sem_post(&plant.taken);
}

static inline void touch_cold(void)
{
	for (u64 end = now() + plant.amount * 1000ULL; now() < end;) {
		if (plant.touched == COLD_PAGES)
			abort();
		(void)plant.file[(size_t)plant.touched++ * PAGE];
	}
}

/* Loses time in an operator of a thread as planted. */
static inline void plant_within(struct log *log, int thread, s64 step)
{
	struct row *row;
	s64 delayed;

	if (thread != plant.thread || is_planted("slow") || is_planted("beside"))
		return;
	row = row_open(log, "plant", step, 0);
	delayed = run_delay();
	BEGIN(row, (void)0);
	if (is_planted("sleep") || is_planted("timer"))
		usleep(plant.amount);
	else if (is_planted("stop"))
		stop_oneself();
	else if (is_planted("open"))
		close(open("libggml-planted", O_RDONLY));
	else if (is_planted("cold"))
		touch_cold();
	else
		take_lock();
	END(row, (void)0);
	row->detail = run_delay() - delayed;
}

#endif
