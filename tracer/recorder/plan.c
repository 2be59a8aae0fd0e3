// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Reads the plan; refuses one made for another machine, other programs or another build of a file, which it names. */
#include <errno.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "recorder.h"

#define PLAN_VERSION 1
#define LARGEST_PLAN (256 << 20)

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
		if (json_is_string(each) && !strcmp(json_string_value(each), text))
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

/* A file at a path of the plan must be the planned build, since others have their functions elsewhere. */
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
			fail("%s is not a program or library; the plan was made for build %s of it", path, text_of(file, "id"));
		if (strcmp(id, text_of(file, "id")))
			fail("%s is build %s, the plan was made for %s: plan again with this machine's file", path, id, text_of(file, "id"));
	}
}

static bool holds_only(json_t *array, json_type type)
{
	size_t index;
	json_t *each;

	json_array_foreach(array, index, each) {
		if (json_typeof(each) != type)
			return false;
	}
	return true;
}

static bool is_sound(json_t *file)
{
	const char *cookie;
	json_t *spec;

	json_object_foreach(json_object_get(file, "specs"), cookie, spec) {
		if (!json_is_string(spec))
			return false;
	}
	return holds_only(json_object_get(file, "rows"), JSON_OBJECT) && holds_only(json_object_get(file, "engines"), JSON_STRING);
}

static void check_shape(const char *path, json_t *plan)
{
	static const struct {
		const char *key;
		json_type type, of; /* `of`: type of an array's members */
	} parts[] = {
		{"programs", JSON_OBJECT, 0},	{"kernel", JSON_ARRAY, JSON_ARRAY},	  {"patterns", JSON_ARRAY, JSON_STRING},
		{"files", JSON_ARRAY, JSON_OBJECT}, {"engines", JSON_OBJECT, 0},	  {"layouts", JSON_OBJECT, 0},
		{"settings", JSON_OBJECT, 0},	{"at_run_time", JSON_ARRAY, JSON_OBJECT}, {"levels", JSON_ARRAY, JSON_STRING},
		{"functions", JSON_ARRAY, JSON_OBJECT},
	};
	size_t index;
	json_t *file;

	for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
		json_t *part = json_object_get(plan, parts[i].key);

		if (!part || json_typeof(part) != parts[i].type || (json_is_array(part) && !holds_only(part, parts[i].of)))
			fail("%s is damaged (at %s): write it again with `moescope plan`", path, parts[i].key);
	}
	json_array_foreach(json_object_get(plan, "files"), index, file) {
		if (!is_sound(file))
			fail("%s is damaged (at files): write it again with `moescope plan`", path);
	}
}

json_t *read_plan(const char *path)
{
	json_error_t error;
	int fd = open_as_user(path, LARGEST_PLAN);
	json_t *plan = fd < 0 ? NULL : json_loadfd(fd, 0, &error);

	if (fd < 0)
		fail("%s cannot be read as a plan: %s", path, strerror(errno));
	close(fd);
	if (!plan)
		fail("%s cannot be read as a plan: line %d: %s", path, error.line, error.text);
	return plan;
}

void check_plan(json_t *plan, const char *path)
{
	struct utsname system;

	uname(&system);
	if (number_of(plan, "plan_version") != PLAN_VERSION)
		fail("%s has plan version %lld, this recorder reads %d: use both from one release", path,
		     (long long)number_of(plan, "plan_version"), PLAN_VERSION);
	check_shape(path, plan);
	if (strcmp(text_of(plan, "arch"), system.machine))
		fail("%s was made for %s, this machine is %s", path, text_of(plan, "arch"), system.machine);
	if (strcmp(text_of(plan, "sources"), SOURCES))
		fail("%s was made for other programs (%s) than this recorder contains (%s): use both from one release", path,
		     text_of(plan, "sources"), SOURCES);
	check_files(plan);
}
