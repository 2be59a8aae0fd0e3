// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Waits of one kind, planted: waits KIND ROUNDS [FILE]. KIND: mutex, storm, pipe, sleep, read, fault, cond, epoll.
 * Prints JSON: begin and end of each wait of the main thread (CLOCK_MONOTONIC, ns), as the program saw them. FILE is read by two.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST 1000
#define PART (256 * 1024)
#define MS 1000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ready = PTHREAD_COND_INITIALIZER;
static int rounds, ends[2], file, poller, is_ready;
static volatile int asked, turn, sink;
static unsigned long waited[MOST][2];
static char *bytes;

static unsigned long now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

/* The other thread's side of each wait, 5 ms after the main thread has begun it. */
__attribute__((noipa)) static void wake_mutex(void)
{
	pthread_mutex_lock(&lock);
	turn = 1;
	usleep(5 * MS);
	pthread_mutex_unlock(&lock);
	while (turn)
		usleep(100);
}

__attribute__((noipa)) static void wake_storm(void)
{
	for (int i = 0; i < 2000; i++) {
		pthread_mutex_lock(&lock);
		for (int j = 0; j < 3000; j++)
			sink += j;
		pthread_mutex_unlock(&lock);
	}
}

__attribute__((noipa)) static void wake_pipe(void) { usleep(5 * MS); sink += write(ends[1], "x", 1); }
__attribute__((noipa)) static void wake_epoll(void) { usleep(5 * MS); sink += send(ends[1], "x", 1, 0); }

__attribute__((noipa)) static void wake_cond(void)
{
	usleep(5 * MS);
	pthread_mutex_lock(&lock);
	is_ready = 1;
	pthread_cond_signal(&ready);
	pthread_mutex_unlock(&lock);
}

__attribute__((noipa)) static void wait_mutex(int i)
{
	(void)i;
	pthread_mutex_lock(&lock);
	pthread_mutex_unlock(&lock);
}

__attribute__((noipa)) static void wait_storm(int i) { (void)i; wake_storm(); }
__attribute__((noipa)) static void wait_pipe(int i) { char byte; (void)i; sink += read(ends[0], &byte, 1); }
__attribute__((noipa)) static void wait_sleep(int i) { (void)i; usleep(5 * MS); sink++; }
__attribute__((noipa)) static void wait_read(int i) { sink += pread(file, bytes, PART, (long)i * PART); }
__attribute__((noipa)) static void wait_fault(int i) { sink += bytes[(long)i * PART]; }

__attribute__((noipa)) static void wait_cond(int i)
{
	(void)i;
	pthread_mutex_lock(&lock);
	while (!is_ready)
		pthread_cond_wait(&ready, &lock);
	is_ready = 0;
	pthread_mutex_unlock(&lock);
}

__attribute__((noipa)) static void wait_epoll(int i)
{
	struct epoll_event event;
	char byte;

	(void)i;
	sink += epoll_wait(poller, &event, 1, -1);
	sink += recv(ends[0], &byte, 1, 0);
}

struct kind {
	const char *name;
	void (*wait)(int i);
	void (*wake)(void);
};

static const struct kind kinds[] = {
	{"mutex", wait_mutex, wake_mutex}, {"storm", wait_storm, wake_storm}, {"pipe", wait_pipe, wake_pipe},
	{"sleep", wait_sleep, NULL},	   {"read", wait_read, NULL},	      {"fault", wait_fault, NULL},
	{"cond", wait_cond, wake_cond},	   {"epoll", wait_epoll, wake_epoll},
};

static void *wake(void *data)
{
	const struct kind *kind = data;

	pthread_setname_np(pthread_self(), "waker");
	for (int i = 0; i < rounds; i++) {
		while (asked <= i)
			usleep(100);
		kind->wake();
	}
	return NULL;
}

static void prepare(const char *kind, const char *path)
{
	if (!strcmp(kind, "pipe"))
		sink += pipe(ends);
	if (!strcmp(kind, "epoll")) {
		struct epoll_event event = {.events = EPOLLIN};

		sink += socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
		poller = epoll_create1(0);
		epoll_ctl(poller, EPOLL_CTL_ADD, ends[0], &event);
	}
	if (path) {
		file = open(path, O_RDONLY);
		posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
		bytes = strcmp(kind, "fault") ? malloc(PART) : mmap(NULL, (long)rounds * PART, PROT_READ, MAP_SHARED, file, 0);
		if (!strcmp(kind, "fault"))
			madvise(bytes, (long)rounds * PART, MADV_RANDOM);
		posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
	}
}

int main(int argc, char **argv)
{
	const struct kind *kind = kinds;
	pthread_t waker;

	if (argc < 3)
		return 2;
	while (strcmp(kind->name, argv[1]))
		if (++kind == kinds + sizeof(kinds) / sizeof(*kinds))
			return 2;
	rounds = atoi(argv[2]);
	prepare(kind->name, argc > 3 ? argv[3] : NULL);
	if (kind->wake)
		pthread_create(&waker, NULL, wake, (void *)kind);
	for (int i = 0; i < rounds; i++) {
		asked = i + 1;
		while (!strcmp(kind->name, "mutex") && !turn)
			usleep(100);
		waited[i][0] = now();
		kind->wait(i);
		waited[i][1] = now();
		turn = 0;
	}
	if (kind->wake)
		pthread_join(waker, NULL);
	printf("[");
	for (int i = 0; i < rounds; i++)
		printf("%s[%lu, %lu]", i ? ", " : "", waited[i][0], waited[i][1]);
	printf("]\n");
	return 0;
}
