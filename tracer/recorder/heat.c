// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Reads clocks and heat from sysfs a few times a second, by a sampler: some zones and clocks are asked of firmware or a slow bus. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "recorder.h"

#define MOST_NUMBER 1024 /* of policies, zones and devices, whose numbers may have gaps */
#define MOST_GAUGES 1024
#define MOST_QUEUED 16384
#define PERIOD_NS (NS_PER_S / 4)
#define SHARE 1000 /* of a core, whose part reading may cost */
#define SLOW 10 /* least pause as a multiple of a reading's duration: a slow bus has other users */
#define ROOT "/sys"
#define POLICY "%s/devices/system/cpu/cpufreq/policy%d"
#define ZONE "%s/class/thermal/thermal_zone%d"
#define DEVICE "%s/class/thermal/cooling_device%d"

static struct gauge {
	u16 what, number;
	bool known, fails;
	s32 last;
	int fd;
	char *path;
} gauges[MOST_GAUGES];
static int gauge_count;
static const char *root = ROOT;
static bool of_user; /* who named that folder */
static json_t *found;
static struct rec_heat queue[MOST_QUEUED], taken[MOST_QUEUED];
static u32 queued;
static u64 next_opening;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A file's first line, valid until the next call; "" if it cannot be read. */
static char *line_of(const char *path)
{
	static char line[1024];
	int fd = open_sensor(path, of_user);

	sensor_text(fd, line, sizeof(line));
	if (fd >= 0)
		close(fd);
	line[strcspn(line, "\n")] = 0;
	return line;
}

static char *path_in(const char *folder, const char *name)
{
	static char path[PATH_MOST];

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	return path;
}

static json_t *number_json(const char *folder, const char *name)
{
	s64 number;

	return number_from(line_of(path_in(folder, name)), &number) ? json_integer(number) : json_null();
}

static json_t *text_json(const char *folder, const char *name)
{
	return plain_text(line_of(path_in(folder, name)));
}

static void add_gauge(u16 what, u16 number, const char *folder, const char *name)
{
	struct gauge *g = &gauges[gauge_count];

	if (gauge_count == MOST_GAUGES)
		return;
	*g = (struct gauge){.what = what, .number = number, .path = strdup(path_in(folder, name))};
	g->fd = open_sensor(g->path, of_user);
	gauge_count++;
}

static json_t *policy(const char *folder, int number)
{
	json_t *cpus = json_array();
	char *rest = line_of(path_in(folder, "related_cpus")), first[PATH_MOST];

	for (char *word; (word = strsep(&rest, " "));)
		if (*word)
			json_array_append_new(cpus, json_integer(atoi(word)));
	add_gauge(HEAT_KHZ, number, folder, "scaling_cur_freq");
	add_gauge(HEAT_LEAST_KHZ, number, folder, "scaling_min_freq");
	add_gauge(HEAT_MOST_KHZ, number, folder, "scaling_max_freq");
	snprintf(first, sizeof(first), "%s/devices/system/cpu/cpu%d", root, number); /* a policy has the number of its first CPU */
	return json_pack("{si so so so so so}", "number", number, "cpus", cpus, "governor", text_json(folder, "scaling_governor"), "least",
			 number_json(folder, "cpuinfo_min_freq"), "most", number_json(folder, "cpuinfo_max_freq"), "capacity",
			 number_json(first, "cpu_capacity"));
}

static json_t *zone(const char *folder, int number)
{
	json_t *trips = json_array();
	char kind[32], temperature[32];

	for (int i = 0;; i++) {
		snprintf(kind, sizeof(kind), "trip_point_%d_type", i);
		snprintf(temperature, sizeof(temperature), "trip_point_%d_temp", i);
		if (!*line_of(path_in(folder, kind)))
			break;
		json_array_append_new(trips, json_pack("[oo]", text_json(folder, kind), number_json(folder, temperature)));
	}
	add_gauge(HEAT_ZONE, number, folder, "temp");
	return json_pack("{si so so}", "number", number, "type", text_json(folder, "type"), "trips", trips);
}

static json_t *device(const char *folder, int number)
{
	add_gauge(HEAT_COOLING, number, folder, "cur_state");
	return json_pack("{si so so}", "number", number, "type", text_json(folder, "type"), "most", number_json(folder, "max_state"));
}

/* Descriptions of all folders that `form` names with a number. */
static json_t *each(const char *form, json_t *(*describe)(const char *folder, int number))
{
	json_t *rows = json_array();
	char folder[PATH_MOST];

	for (int number = 0; number < MOST_NUMBER; number++) {
		snprintf(folder, sizeof(folder), form, root, number);
		if (!access(folder, F_OK))
			json_array_append_new(rows, describe(folder, number));
	}
	return rows;
}

static bool any(const char *form)
{
	char folder[96];
	int number = 0;

	do
		snprintf(folder, sizeof(folder), form, ROOT, number);
	while (access(folder, F_OK) && ++number < MOST_NUMBER);
	return number < MOST_NUMBER;
}

/* Whether this machine has anything that fires the tracepoints of a category. */
static bool is_fired(const char *category)
{
	return !strcmp(category, "power") ? any(POLICY) : any(ZONE) || any(DEVICE);
}

void leave_silent_programs(json_t *plan, bool elsewhere)
{
	const char *name, *level, *category;
	size_t index;
	json_t *each;

	json_array_foreach(json_object_get(plan, "kernel"), index, each) {
		if (!json_unpack(each, "[sss]", &name, &level, &category) && !strcmp(level, "heat") &&
		    (elsewhere || !has_tracepoint(category, name) || !is_fired(category)))
			json_object_del(json_object_get(plan, "programs"), name);
	}
}

/* null if there is nothing */
json_t *heat_found(void)
{
	return gauge_count ? found : json_null();
}

/* The governor of all policies, or each policy's in order if they differ. */
void governors(char *text, size_t bytes)
{
	json_t *policies = json_object_get(found, "policies"), *each;
	const char *first = text_of(json_array_get(policies, 0), "governor");
	bool differ = false;
	size_t i, used;

	json_array_foreach(policies, i, each)
		differ |= strcmp(first, text_of(each, "governor")) != 0;
	snprintf(text, bytes, "%s", first);
	json_array_foreach(policies, i, each) {
		used = strlen(text);
		if (differ && i)
			snprintf(text + used, bytes - used, ", %s", text_of(each, "governor"));
	}
}

static void push(struct gauge *g, s32 value, u64 ts)
{
	pthread_mutex_lock(&lock);
	g->known = true;
	g->last = value;
	if (queued < MOST_QUEUED)
		queue[queued++] = (struct rec_heat){.h = {.ts = ts, .kind = KIND_HEAT}, .what = g->what, .number = g->number, .value = value};
	pthread_mutex_unlock(&lock);
}

/* Values that differ from the last ones, as of the reading's begin. */
static void read_gauges(struct sampler *s)
{
	u64 began = now_ns();
	s64 number;
	s32 value;

	for (int i = 0; i < gauge_count; i++) {
		struct gauge *g = &gauges[i];
		bool is_known = sensor_number(g->fd, &number);

		g->fails = !is_known;
		value = number;
		if (is_known && value == number && !(g->known && g->last == value))
			push(g, value, began);
	}
	s->period_ns = (now_ns() - began) * SLOW < PERIOD_NS ? PERIOD_NS : (now_ns() - began) * SLOW;
}

static struct sampler sampler = {.name = "clocks and heat", .read = read_gauges, .period_ns = PERIOD_NS, .least_pause = SHARE};

void heat_begin(const char *below)
{
	of_user = below;
	root = below ? below : ROOT;
	found = json_object();
	json_object_set_new(found, "policies", each(POLICY, policy));
	json_object_set_new(found, "zones", each(ZONE, zone));
	json_object_set_new(found, "cooling", each(DEVICE, device));
	if (gauge_count)
		start_sampler(&sampler);
}

/* A CPU that comes back has files of its own. */
static void open_failing(void)
{
	if (now_ns() < next_opening)
		return;
	next_opening = now_ns() + NS_PER_S;
	for (int i = 0; i < gauge_count; i++)
		if (gauges[i].fails)
			open_sensor_again(gauges[i].path, of_user, &gauges[i].fd);
}

void heat_turn(void)
{
	u32 count;

	pthread_mutex_lock(&lock);
	count = queued;
	memcpy(taken, queue, count * sizeof(*taken));
	queued = 0;
	pthread_mutex_unlock(&lock);
	for (u32 i = 0; i < count; i++)
		add_event(&taken[i].h);
	open_failing();
}

void each_heat(void (*act)(u16 what, u16 number, s32 value))
{
	for (int i = 0; i < gauge_count; i++) {
		struct gauge g;

		pthread_mutex_lock(&lock);
		g = gauges[i];
		pthread_mutex_unlock(&lock);
		if (g.known && !g.fails)
			act(g.what, g.number, g.last);
	}
}
