// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Reads clocks and heat from sysfs once a second, as tracer/recording/heat.py does for the Python tracer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "recorder.h"

#define MOST_NUMBER 1024 /* of policies, zones and devices, whose numbers may have gaps */
#define MOST_GAUGES 1024
#define SHARE 100 /* minimum interval between readings, as a multiple of a reading's duration */
#define POLICY "/sys/devices/system/cpu/cpufreq/policy%d"
#define ZONE "/sys/class/thermal/thermal_zone%d"
#define DEVICE "/sys/class/thermal/cooling_device%d"

static struct gauge {
	u16 what, number;
	bool known;
	s32 last;
	char path[96];
} gauges[MOST_GAUGES];
static int gauge_count;
static u64 due_ns;
static json_t *found;

/* A file's first line, valid until the next call; "" if it cannot be read. */
static char *line_of(const char *path)
{
	static char line[1024];
	FILE *file = fopen(path, "re");

	*line = 0;
	if (file && !fgets(line, sizeof(line), file))
		*line = 0;
	if (file)
		fclose(file);
	line[strcspn(line, "\n")] = 0;
	return line;
}

static bool number_in(const char *path, s32 *number)
{
	char *line = line_of(path), *end;
	s64 value = strtoll(line, &end, 10);

	*number = value;
	return *line && !*end && value == *number;
}

static char *path_in(const char *folder, const char *name)
{
	static char path[160];

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	return path;
}

static json_t *number_json(const char *folder, const char *name)
{
	s32 number;

	return number_in(path_in(folder, name), &number) ? json_integer(number) : json_null();
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
	*g = (struct gauge){.what = what, .number = number};
	snprintf(g->path, sizeof(g->path), "%s/%s", folder, name);
	gauge_count++;
}

static json_t *policy(const char *folder, int number)
{
	json_t *cpus = json_array();
	char *rest = line_of(path_in(folder, "related_cpus")), first[64];

	for (char *word; (word = strsep(&rest, " "));)
		if (*word)
			json_array_append_new(cpus, json_integer(atoi(word)));
	add_gauge(HEAT_KHZ, number, folder, "scaling_cur_freq");
	add_gauge(HEAT_LEAST_KHZ, number, folder, "scaling_min_freq");
	add_gauge(HEAT_MOST_KHZ, number, folder, "scaling_max_freq");
	snprintf(first, sizeof(first), "/sys/devices/system/cpu/cpu%d", number); /* a policy has the number of its first CPU */
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
	char folder[64];

	for (int number = 0; number < MOST_NUMBER; number++) {
		snprintf(folder, sizeof(folder), form, number);
		if (!access(folder, F_OK))
			json_array_append_new(rows, describe(folder, number));
	}
	return rows;
}

static bool any(const char *form)
{
	char folder[64];
	int number = 0;

	do
		snprintf(folder, sizeof(folder), form, number);
	while (access(folder, F_OK) && ++number < MOST_NUMBER);
	return number < MOST_NUMBER;
}

/* Whether this machine has anything that fires the tracepoints of a category. */
static bool is_fired(const char *category)
{
	return !strcmp(category, "power") ? any(POLICY) : any(ZONE) || any(DEVICE);
}

void leave_silent_programs(json_t *plan)
{
	const char *name, *level, *category;
	size_t index;
	json_t *each;

	json_array_foreach(json_object_get(plan, "kernel"), index, each) {
		if (!json_unpack(each, "[sss]", &name, &level, &category) && !strcmp(level, "heat") &&
		    (!has_tracepoint(category, name) || !is_fired(category)))
			json_object_del(json_object_get(plan, "programs"), name);
	}
}

void heat_begin(void)
{
	found = json_object();
	json_object_set_new(found, "policies", each(POLICY, policy));
	json_object_set_new(found, "zones", each(ZONE, zone));
	json_object_set_new(found, "cooling", each(DEVICE, device));
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

static void send(struct gauge *g, s32 value, u64 ts)
{
	struct rec_heat r = {.h = {.ts = ts, .kind = KIND_HEAT}, .what = g->what, .number = g->number, .value = value};

	g->known = true;
	g->last = value;
	add_event(&r.h);
}

void heat_turn(bool last)
{
	u64 began = now_ns(), now;
	s32 value;

	if (began < due_ns && !last)
		return;
	for (int i = 0; i < gauge_count; i++)
		if (number_in(gauges[i].path, &value) && !(gauges[i].known && gauges[i].last == value))
			send(&gauges[i], value, began);
	now = now_ns();
	due_ns = now + SHARE * (now - began);
}
