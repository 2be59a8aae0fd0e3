// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Files that the target opens: probed by the plan, else as the planner answers; and what the planner orders later. */
#include <stdint.h>
#include <unistd.h>

#include "recorder.h"

static json_t *plan, *merged;
static u64 planner_cpu;

void orders_begin(const struct choice *choice)
{
	plan = choice->plan;
	merged = json_deep_copy(json_object_get(plan, "manifest"));
	if (!merged)
		merged = json_object();
}

json_t *merged_entries(void)
{
	return merged;
}

u64 planner_cpu_ns(void)
{
	return planner_cpu;
}

static void warn_each(json_t *all)
{
	size_t index;
	json_t *each;

	json_array_foreach(all, index, each) {
		warn("%s", json_string_value(each));
	}
}

static void attach_rows(json_t *files, json_t *rows)
{
	size_t index;
	json_t *each;

	json_array_foreach(files, index, each) {
		json_array_append(json_object_get(plan, "files"), each);
		attach_planned(each, text_of(each, "path"));
	}
	json_array_foreach(rows, index, each) {
		attach_new_row(json_deep_copy(each), text_of(each, "library"));
	}
}

static void add_to_engines(json_t *all)
{
	const char *name;
	json_t *each;

	json_object_foreach(all, name, each) {
		json_object_update(json_object_get(json_object_get(plan, "engines"), name), each);
	}
}

void carry_out_order(json_t *order)
{
	json_t *settings = json_object_get(order, "settings"), *rows = json_object_get(order, "rows");

	load_more(json_object_get(order, "programs"));
	take_settings(settings); /* before the programs that read them */
	if (settings)
		set_settings(true);
	json_array_extend(json_object_get(plan, "at_run_time"), json_object_get(order, "at_run_time"));
	attach_rows(json_object_get(order, "files"), rows);
	retire(json_object_get(order, "retire"));
	add_to_engines(json_object_get(order, "engines"));
	warn_each(json_object_get(order, "warnings"));
	if (json_object_get(order, "planner_cpu_ns"))
		planner_cpu = number_of(order, "planner_cpu_ns");
	json_object_update(merged, json_object_get(order, "manifest"));
	if (placed())
		set_settings(true);
	if (json_array_size(rows))
		tell_planner(json_pack("{s{sI}}", "placed", "ts", (json_int_t)now_ns()));
}

static void ask_about(const char *path, const char *id, bool is_executable)
{
	int fd = open_as_user(path, INT64_MAX);
	json_t *answer = ask_planner(json_pack("{so ss sb sb}", "path", plain_text(path), "id", id, "executable", is_executable,
						     "handed", fd >= 0), fd);

	if (fd >= 0)
		close(fd);
	carry_out_order(answer);
	json_decref(answer);
}

bool probe_file(const char *path, bool is_executable)
{
	int before = placed();
	const char *id = "";
	enum known known = attach_known(path, &id);

	if (known == UNKNOWN && asks_about(is_executable))
		ask_about(path, id, is_executable);
	else if (known == UNKNOWN && !is_executable)
		warn("%s (build %s) is not in the plan: nothing is probed in it", path, id);
	else if (known == UNREADABLE && !is_executable)
		warn("%s cannot be read as a program or library: nothing is probed in it", path);
	return placed() > before;
}
