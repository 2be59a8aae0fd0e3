// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Performance counters per thread; the BPF programs find a thread's by its first index in the map `counters`. */
#include <errno.h>
#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "recorder.h"

struct event {
	char name[64];
	u32 type;
	u64 config;
};

struct counted {
	pid_t tid; /* 0: this slot is free */
	int fds[MAX_PMC];
};

static struct event events[MAX_PMC];
static u32 n_events;
static struct counted slots[MAX_COUNTED_THREADS];
static u32 uncounted; /* threads that ended before their counters were opened, or for which there was no room */

/* Pinned: it counts all the time, or reports that the PMU has no room; it is never extrapolated. */
static int open_counter(const struct event *event, pid_t tid)
{
	struct perf_event_attr attributes = {.type = event->type, .config = event->config, .pinned = 1};

	return open_event(&attributes, tid, -1);
}

static void choose_event(const char *text)
{
	struct event *event = &events[n_events];
	unsigned long long config;
	int fd, end = 0;

	if (n_events == MAX_PMC)
		fail("--pmc takes at most %d events", MAX_PMC);
	if (sscanf(text, "%63[^=]=%u:%llx%n", event->name, &event->type, &config, &end) != 3 || text[end] || config > INT64_MAX)
		fail("--pmc %s is not NAME=TYPE:CONFIG, with perf's number of the type and its config in hexadecimal", text);
	event->config = config;
	fd = open_counter(event, 0);
	if (fd < 0)
		fail("this machine does not have the event %s: %s; `perf list` shows those that it has", event->name, strerror(errno));
	close(fd);
	n_events++;
}

void choose_events(char *text)
{
	for (char *each; (each = strsep(&text, ","));)
		choose_event(each);
}

u32 event_count(void)
{
	return n_events;
}

static struct counted *slot_of(pid_t tid)
{
	for (int i = 0; n_events && i < MAX_COUNTED_THREADS; i++)
		if (slots[i].tid == tid)
			return &slots[i];
	return NULL;
}

static void close_counters(const struct counted *slot, u32 count)
{
	for (u32 i = 0; i < count; i++)
		close(slot->fds[i]);
}

/* False, with nothing left open, if the thread has ended. */
static bool open_counters(struct counted *slot, pid_t tid)
{
	for (u32 i = 0; i < n_events; i++) {
		slot->fds[i] = open_counter(&events[i], tid);
		if (slot->fds[i] < 0) {
			close_counters(slot, i);
			return false;
		}
	}
	return true;
}

void count_thread(pid_t tid)
{
	struct counted *slot = slot_of(0);
	u32 first;

	if (!n_events || slot_of(tid))
		return;
	if (!slot || !open_counters(slot, tid)) {
		uncounted++;
		return;
	}
	slot->tid = tid;
	first = (slot - slots) * MAX_PMC;
	for (u32 i = 0; i < n_events; i++) {
		u32 key = first + i;

		set_map("counters", &key, &slot->fds[i]);
	}
	set_map("counted", &tid, &first);
}

void uncount_thread(pid_t tid)
{
	struct counted *slot = tid ? slot_of(tid) : NULL;

	if (!slot)
		return;
	delete_from_map("counted", &tid);
	for (u32 i = 0; i < n_events; i++) {
		u32 key = (slot - slots) * MAX_PMC + i;

		delete_from_map("counters", &key);
	}
	close_counters(slot, n_events);
	slot->tid = 0;
}

void uncount_all(void)
{
	for (int i = 0; i < MAX_COUNTED_THREADS; i++)
		uncount_thread(slots[i].tid);
}

/* Each counter of each thread is an open file. */
void allow_many_files(void)
{
	struct rlimit limit;

	if (n_events && !getrlimit(RLIMIT_NOFILE, &limit)) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

/* The manifest's key `pmc`; null without counters. */
json_t *counters(void)
{
	json_t *rows = json_array();

	for (u32 i = 0; i < n_events; i++)
		json_array_append_new(rows, json_pack("{ss si sI}", "name", events[i].name, "type", events[i].type, "config",
						      (json_int_t)events[i].config));
	if (n_events)
		return json_pack("{so si}", "events", rows, "uncounted_threads", uncounted);
	json_decref(rows);
	return json_null();
}
