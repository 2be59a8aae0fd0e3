// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The plan: read, and refused by name where it was made for another machine, other programs or other builds of a file. */
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "collect.h"

#define PLAN_VERSION 1

const char *text_of(json_t *object, const char *key)
{
	const char *text = json_string_value(json_object_get(object, key));

	return text ? text : "";
}

s64 number_of(json_t *object, const char *key)
{
	return json_integer_value(json_object_get(object, key));
}

bool lists(json_t *array, const char *text)
{
	size_t index;
	json_t *each;

	json_array_foreach(array, index, each) {
		if (!strcmp(json_string_value(each), text))
			return true;
	}
	return false;
}

json_t *planned_file(json_t *plan, const char *id)
{
	size_t index;
	json_t *file;

	json_array_foreach(json_object_get(plan, "files"), index, file) {
		if (!strcmp(text_of(file, "id"), id))
			return file;
	}
	return NULL;
}

/* A file that lies where the plan has it must be the one that was planned: another build has its functions elsewhere. */
static void check_files(json_t *plan)
{
	char id[64];
	size_t index;
	json_t *file;

	json_array_foreach(json_object_get(plan, "files"), index, file) {
		const char *path = text_of(file, "path");

		if (!json_array_size(json_object_get(file, "rows")) || access(path, F_OK))
			continue;
		if (!identify(path, id, sizeof(id)))
			fail("%s is no program or library; the plan was made for build %s of it", path, text_of(file, "id"));
		if (strcmp(id, text_of(file, "id")))
			fail("%s is build %s, the plan was made for %s: plan again with this machine's file", path, id, text_of(file, "id"));
	}
}

static void check_shape(const char *path, json_t *plan)
{
	static const char *const keys[] = {"programs", "kernel", "patterns", "files", "engines", "layouts", "settings", "at_run_time"};

	for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
		if (!json_object_get(plan, keys[i]))
			fail("%s is damaged (it has no %s): write it again with `moescope plan`", path, keys[i]);
	}
}

json_t *read_plan(const char *path)
{
	struct utsname system;
	json_error_t error;
	json_t *plan = json_load_file(path, 0, &error);

	uname(&system);
	if (!plan)
		fail("%s cannot be read as a plan: line %d: %s", path, error.line, error.text);
	if (number_of(plan, "plan_version") != PLAN_VERSION)
		fail("%s has plan version %lld, this collector reads %d: take both from one release", path,
		     (long long)number_of(plan, "plan_version"), PLAN_VERSION);
	check_shape(path, plan);
	if (strcmp(text_of(plan, "arch"), system.machine))
		fail("%s was made for %s, this machine is %s", path, text_of(plan, "arch"), system.machine);
	if (strcmp(text_of(plan, "sources"), SOURCES))
		fail("%s was made for other programs (%s) than this collector holds (%s): take both from one release", path,
		     text_of(plan, "sources"), SOURCES);
	check_files(plan);
	return plan;
}
