// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What a frame is: file, function, line; in generated code by the map that its program wrote for perf. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "unwind.h"

/* Of libstdc++: a C++ name as in the source; NULL for others. */
char *__cxa_demangle(const char *mangled, char *buffer, size_t *length, int *status);

struct code {
	u64 start, bytes;
	u32 order; /* in the file: a later line takes the place of an earlier one */
	char *name;
};

struct jit_map {
	struct code *rows;
	int count;
};

static int by_start(const void *a, const void *b)
{
	const struct code *first = a, *second = b;

	if (first->start != second->start)
		return first->start < second->start ? -1 : 1;
	return first->order < second->order ? -1 : 1;
}

/* Lines of start and size, in hexadecimal, and name. */
static struct jit_map *read_jit_map(u32 pid)
{
	struct jit_map *map = calloc(1, sizeof(*map));
	char path[4096], line[4096];
	int room = 0, at = 0;
	FILE *file;

	snprintf(path, sizeof(path), "%s/perf-%u.map", folder, pid);
	file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file)) {
		struct code code = {.order = map->count};

		line[strcspn(line, "\n")] = 0;
		if (sscanf(line, "%lx %lx %n", &code.start, &code.bytes, &at) != 2 || !line[at])
			continue;
		code.name = strdup(line + at);
		if (map->count == room)
			map->rows = grown(map->rows, &room, sizeof(*map->rows));
		map->rows[map->count++] = code;
	}
	if (file)
		fclose(file);
	if (map->count)
		qsort(map->rows, map->count, sizeof(*map->rows), by_start);
	return map;
}

static const struct code *code_at(struct process *p, u64 address)
{
	int low = 0, high;

	if (!p->jit)
		p->jit = read_jit_map(p->pid);
	for (high = p->jit->count; low < high;) {
		int middle = (low + high) / 2;

		if (p->jit->rows[middle].start <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low && address - p->jit->rows[low - 1].start < p->jit->rows[low - 1].bytes ? &p->jit->rows[low - 1] : NULL;
}

bool is_python(struct process *p, u64 address)
{
	const struct code *code = code_at(p, address);

	return code && !strncmp(code->name, "py::", 4);
}

/* CPython names its functions py::NAME:FILE. */
static void describe_code(json_t *frame, const struct code *code, u64 address)
{
	const char *python = !strncmp(code->name, "py::", 4) ? code->name + 4 : NULL, *colon = python ? strchr(python, ':') : NULL;

	json_object_set_new(frame, "offset", json_integer(address - code->start));
	json_object_set_new(frame, "function", colon ? json_stringn(python, colon - python) : json_string(code->name));
	if (colon)
		json_object_set_new(frame, "file", json_string(colon + 1));
}

static void describe_source(json_t *frame, Dwfl_Module *module, u64 address)
{
	GElf_Off offset = 0;
	GElf_Sym symbol;
	const char *name = dwfl_module_addrinfo(module, address, &offset, &symbol, NULL, NULL, NULL), *source;
	Dwfl_Line *line = dwfl_module_getsrc(module, address);
	int number, status;

	if (name && offset < (symbol.st_size ? symbol.st_size : 4096)) {
		char *plain = strncmp(name, "_Z", 2) ? NULL : __cxa_demangle(name, NULL, NULL, &status); /* "c" alone were a type */

		json_object_set_new(frame, "function", json_string(plain ? plain : name));
		free(plain);
		json_object_set_new(frame, "offset", json_integer(offset));
	}
	source = line ? dwfl_lineinfo(line, NULL, &number, NULL, NULL, NULL) : NULL;
	if (source)
		json_object_set_new(frame, "line", json_sprintf("%s:%d", source, number));
}

json_t *described(struct process *p, u64 address, u8 way)
{
	Dwfl_Module *module = p->dwfl ? dwfl_addrmodule(p->dwfl, address) : NULL;
	const struct mapping *m = mapping_of(p, address);
	const struct code *code = module ? NULL : code_at(p, address);
	Dwarf_Addr bias = 0;
	json_t *frame = json_object();

	json_object_set_new(frame, "file", json_string(m ? m->path : ""));
	if (module)
		dwfl_module_getelf(module, &bias);
	json_object_set_new(frame, "address", json_integer(address - bias));
	if (module)
		describe_source(frame, module, address);
	else if (code)
		describe_code(frame, code, address);
	if (way == BY_POINTER)
		json_object_set_new(frame, "found_by", json_string("frame pointer"));
	return frame;
}
