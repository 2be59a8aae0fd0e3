// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The programs and their maps: those inside this file, loaded by libbpf, or those that another process compiles (handed.c). */
#include <bpf/bpf.h>
#include <bpf/btf.h>
#include <bpf/libbpf.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "kernel_features.h"
#include "handed.h"

#define MESSAGE_BYTES (1 << 16)
#define COOKIE_MARK 0x0C00C1E5 /* placeholder for the cookie in programs for kernels without cookies (bpf/custom.bpf.c) */

/* object.S: the size of the programs in 8 bytes, then the programs, deflated */
extern const u8 packed_for_ring[], packed_for_ring_end[], packed_for_perf[], packed_for_perf_end[];

#define MOST_MAPS 32
#define MOST_LOADED 512

static char *map_names[MOST_MAPS];
static int map_fds[MOST_MAPS], map_count;
static struct {
	const char *name;
	int fd;
	struct bpf_program *program; /* of an object that stays open */
} loaded[MOST_LOADED];
static int loaded_count;
static const struct choice *chosen;
static json_t *refused; /* program → reason */
static char messages[MESSAGE_BYTES];

static int keep_message(enum libbpf_print_level level, const char *format, va_list arguments)
{
	size_t used = strlen(messages);

	if (level == LIBBPF_WARN && used + 1 < sizeof(messages))
		vsnprintf(messages + used, sizeof(messages) - used, format, arguments);
	return 0;
}

static void *unpack(const u8 *packed, const u8 *end, size_t *size)
{
	uLongf bytes = *(const u64 *)packed;
	void *data = malloc(bytes);

	packed += sizeof(u64);
	if (!data || uncompress(data, &bytes, packed, end - packed) != Z_OK)
		fail("the programs inside this recorder are damaged");
	*size = bytes;
	return data;
}

/* Sets the constants that adapt the programs to this kernel; their offsets come from the object's own types. */
static void tell_offered(struct bpf_object *object)
{
	struct bpf_map *map = bpf_object__find_map_by_name(object, ".rodata");
	const struct btf *btf = bpf_object__btf(object);
	size_t size;
	u8 *data = map ? (u8 *)bpf_map__initial_value(map, &size) : NULL;
	s32 section = btf ? btf__find_by_name_kind(btf, ".rodata", BTF_KIND_DATASEC) : -1;
	const struct btf_type *type = section > 0 ? btf__type_by_id(btf, section) : NULL;

	for (int i = 0; data && type && i < btf_vlen(type); i++) {
		const struct btf_var_secinfo *place = btf_var_secinfos(type) + i;
		const char *name = btf__name_by_offset(btf, btf__type_by_id(btf, place->type)->name_off);

		if (!strcmp(name, "has_task_btf"))
			data[place->offset] = has_task_btf();
		else if (!strcmp(name, "has_cookies"))
			data[place->offset] = has_cookies();
	}
}

/* Length of a program's name without the suffix for the begin or end of a call. */
static size_t stem(const char *name)
{
	size_t length = strlen(name);

	if (length > 6 && !strcmp(name + length - 6, "_begin"))
		return length - 6;
	return length > 4 && !strcmp(name + length - 4, "_end") ? length - 4 : length;
}

/* Whether a program, or the other end of its call, was refused. */
static bool is_refused(const char *name)
{
	const char *other;
	json_t *why;

	json_object_foreach(refused, other, why) {
		if (stem(other) == stem(name) && !strncmp(other, name, stem(name)))
			return true;
	}
	return false;
}

/* The last line of the verifier's log, which gives the reason for the refusal. */
static void last_line(char *said, size_t bytes)
{
	strcpy(said, "the kernel gives no reason");
	for (char *rest = messages, *line; (line = strsep(&rest, "\n"));) {
		if (*line && strncmp(line, "libbpf:", 7) && strncmp(line, "processed ", 10) && strncmp(line, "-- ", 3))
			snprintf(said, bytes, "%.200s", line);
	}
}

static void refuse(const char *name)
{
	char said[256];

	last_line(said, sizeof(said));
	json_object_set_new(refused, name, json_string(said));
	warn("the kernel refused %s: %s", name, said);
}

/* Notes the program that the kernel refused, and its name; false if libbpf names none. */
static bool note_refusal(char name[128])
{
	char *at = messages;

	while ((at = strstr(at, "libbpf: prog '"))) {
		const char *rest;

		if (sscanf(at, "libbpf: prog '%127[^']'", name) != 1)
			return false;
		rest = at + strlen("libbpf: prog ''") + strlen(name);
		if (!strncmp(rest, ": BPF program load failed", 25) || !strncmp(rest, ": failed to", 11) || !strncmp(rest, ": relo #", 8))
			break;
		at++;
	}
	if (!at || json_object_get(refused, name))
		return false;
	refuse(name);
	return true;
}

static char btf_path[64];
static const struct btf *types; /* of the programs that are loaded */

static u32 entries_of(struct bpf_map *map)
{
	u32 entries = bpf_map__max_entries(map);

	if (!strcmp(bpf_map__name(map), "stack_copies") && !chosen->stacks_hz)
		return 1;
	if (bpf_map__type(map) == BPF_MAP_TYPE_RINGBUF)
		return chosen->ring_bytes;
	return entries ? entries : (u32)libbpf_num_possible_cpus();
}

/* Makes the maps, which all objects and a process that compiles share. */
static void make_maps(struct bpf_object *object)
{
	struct bpf_map *map;

	bpf_object__for_each_map(map, object) {
		const char *name = bpf_map__name(map);
		int fd;

		if (bpf_map__is_internal(map))
			continue;
		fd = bpf_map_create(bpf_map__type(map), name, bpf_map__key_size(map), bpf_map__value_size(map), entries_of(map), NULL);
		if (fd == -EMFILE)
			check_descriptors(UINT64_MAX);
		if (fd < 0 || map_count == MOST_MAPS)
			fail("the BPF map %s cannot be made: %s", name, strerror(-fd));
		map_names[map_count] = strdup(name);
		map_fds[map_count++] = fd;
	}
}

static void share_maps(struct bpf_object *object)
{
	struct bpf_map *map;

	bpf_object__for_each_map(map, object) {
		if (!bpf_map__is_internal(map))
			bpf_map__reuse_fd(map, map_fd(bpf_map__name(map)));
	}
}

/* Opens the object to load these programs that were not refused, or only those behind `after` unless that is empty. */
static struct bpf_object *open_object(json_t *programs, const char *after)
{
	LIBBPF_OPTS(bpf_object_open_opts, options, .object_name = "moescope", .btf_custom_path = *btf_path ? btf_path : NULL);
	struct bpf_program *program;
	struct bpf_object *object;
	bool is_behind = !*after;
	size_t size;
	void *data = chosen->perf ? unpack(packed_for_perf, packed_for_perf_end, &size)
				  : unpack(packed_for_ring, packed_for_ring_end, &size);

	object = bpf_object__open_mem(data, size, &options);
	if (!object)
		fail("the programs inside this recorder cannot be opened: %s", strerror(errno));
	free(data);
	tell_offered(object);
	if (!map_count)
		make_maps(object);
	share_maps(object);
	bpf_object__for_each_program(program, object) {
		const char *name = bpf_program__name(program);

		bpf_program__set_autoload(program, is_behind && json_object_get(programs, name) && !is_refused(name));
		is_behind |= !strcmp(name, after);
		if (bpf_program__type(program) == BPF_PROG_TYPE_KPROBE && has_multi_links())
			bpf_program__set_expected_attach_type(program, UPROBE_MULTI);
	}
	return object;
}

static void add_loaded(struct bpf_program *program, int fd)
{
	loaded[loaded_count].name = bpf_program__name(program);
	loaded[loaded_count].fd = fd;
	loaded[loaded_count++].program = program;
}

/*
 * Loads an object with these programs, but for those that the kernel refuses. Only what stands behind a refused one is tried next,
 * and at last all accepted ones together: each is verified twice at most.
 */
static void load_by_libbpf(json_t *programs)
{
	char after[128] = ""; /* the last one refused */
	struct bpf_program *program;
	struct bpf_object *object;

	for (;;) {
		int error;

		object = open_object(programs, after);
		messages[0] = 0;
		error = bpf_object__load(object);
		if (!error && !*after)
			break;
		bpf_object__close(object);
		if (error == -EMFILE)
			check_descriptors(UINT64_MAX);
		if (!error)
			after[0] = 0;
		else if (!note_refusal(after))
			fail("the kernel refused the BPF programs: %s: %.300s", strerror(-error), messages);
	}
	types = bpf_object__btf(object);
	bpf_object__for_each_program(program, object) {
		if (bpf_program__fd(program) >= 0 && loaded_count < MOST_LOADED)
			add_loaded(program, bpf_program__fd(program));
	}
}

/* Has the sources compiled for this kernel: by its types, or by its headers where it has none. */
static void begin_by_helper(const struct bpf_object *object)
{
	struct btf *kernel = *btf_path ? btf__parse(btf_path, NULL) : btf__load_vmlinux_btf();
	json_t *names = json_array(), *offsets = kernel ? member_offsets(bpf_object__btf(object), kernel) : json_null();

	for (int i = 0; i < map_count; i++)
		json_array_append_new(names, json_string(map_names[i]));
	btf__free(kernel);
	begin_compiling(chosen->programs_fd, json_pack("{so so sb ss}", "maps", names, "offsets", offsets, "perf", chosen->perf, "tracefs",
						       tracefs()), map_fds, map_count, chosen->waiting);
}

static void load_by_helper(json_t *programs)
{
	static struct bpf_object *object; /* not loaded: what is known of the programs */
	json_t *number;
	const char *name;

	if (!object) {
		object = open_object(programs, "");
		types = bpf_object__btf(object);
		begin_by_helper(object);
	}
	json_object_foreach(programs, name, number) {
		struct bpf_program *program = bpf_object__find_program_by_name(object, name);
		int fd = -1;

		if (program && !is_refused(name) && loaded_count < MOST_LOADED)
			fd = compiled_program(name, bpf_program__type(program), bpf_program__expected_attach_type(program), messages,
					      sizeof(messages));
		if (fd >= 0)
			add_loaded(program, fd);
		else if (program && !is_refused(name))
			refuse(name);
	}
	for (int i = 0; i < loaded_count; i++) {
		if (is_refused(loaded[i].name)) { /* as the other end of its call */
			close(loaded[i].fd);
			loaded[i--] = loaded[--loaded_count];
		}
	}
}

static void load(json_t *programs)
{
	if (chosen->programs_fd < 0)
		load_by_libbpf(programs);
	else
		load_by_helper(programs);
}

/* Its index, or -1. */
static int index_of(const char *name)
{
	for (int i = 0; i < loaded_count; i++) {
		if (!strcmp(loaded[i].name, name))
			return i;
	}
	return -1;
}

void load_more(json_t *programs)
{
	json_t *known = json_object_get(chosen->plan, "programs"), *missing = json_object(), *number;
	const char *name;

	json_object_foreach(programs, name, number) {
		if (!is_loaded(name) && !is_refused(name))
			json_object_set(missing, name, number);
	}
	json_object_update(known, missing);
	if (json_object_size(missing))
		load(missing);
	json_decref(missing);
}

/* libbpf opens the file by the descriptor's name: it is a regular one, opened with the user's rights. */
static void open_btf(const struct choice *choice)
{
	int fd = open_as_user(choice->btf, INT64_MAX);

	if (fd < 0)
		fail("--btf %s cannot be read: %s", choice->btf, strerror(errno));
	snprintf(btf_path, sizeof(btf_path), "/proc/self/fd/%d", fd);
}

void load_programs(const struct choice *choice)
{
	json_t *wanted = json_copy(json_object_get(choice->plan, "programs"));

	chosen = choice;
	refused = json_object();
	libbpf_set_print(keep_message);
	if (has_uprobes())
		json_object_set_new(wanted, "empty", json_true());
	else if (json_object_size(json_object_get(choice->plan, "engines")))
		fail("this kernel has no uprobes (CONFIG_UPROBE_EVENTS)");
	if (choice->btf)
		open_btf(choice);
	else if (access(VMLINUX, R_OK) && choice->programs_fd < 0)
		fail("this kernel has no BTF (%s): give --btf FILE with its types", VMLINUX);
	load(wanted);
	json_decref(wanted);
}

json_t *refused_programs(void)
{
	return refused;
}

json_t *all_programs(bool perf)
{
	size_t size;
	void *data = perf ? unpack(packed_for_perf, packed_for_perf_end, &size) : unpack(packed_for_ring, packed_for_ring_end, &size);
	json_t *names = json_object();
	struct bpf_object *object;
	struct bpf_program *program;

	libbpf_set_print(keep_message);
	object = bpf_object__open_mem(data, size, NULL);
	bpf_object__for_each_program(program, object)
		json_object_set_new(names, bpf_program__name(program), json_integer(-1));
	bpf_object__close(object);
	free(data);
	return names;
}

bool is_loaded(const char *program)
{
	return index_of(program) >= 0;
}

int program_fd(const char *name)
{
	int index = index_of(name);

	return index < 0 ? -1 : loaded[index].fd;
}

const char *loaded_program(int index)
{
	return index < loaded_count ? loaded[index].name : NULL;
}

bool is_raw(const char *program)
{
	return bpf_program__type(loaded[index_of(program)].program) == BPF_PROG_TYPE_RAW_TRACEPOINT;
}

int copy_with_cookie(const char *name, u32 cookie)
{
	struct bpf_program *program = loaded[index_of(name)].program;
	size_t count = bpf_program__insn_cnt(program), bytes = count * sizeof(struct bpf_insn);
	struct bpf_insn *code = malloc(bytes);
	int fd;

	if (!code)
		return -1;
	memcpy(code, bpf_program__insns(program), bytes);
	for (size_t i = 0; i < count; i++)
		if (code[i].code == MOVE_NUMBER && code[i].imm == COOKIE_MARK)
			code[i].imm = cookie;
	fd = load_bare(code, count, has_multi_links());
	free(code);
	return fd;
}

s64 setting_offset(const char *name)
{
	return offset_in(types, btf__find_by_name_kind(types, "settings", BTF_KIND_STRUCT), name);
}

int map_fd(const char *name)
{
	for (int i = 0; i < map_count; i++) {
		if (!strcmp(map_names[i], name))
			return map_fds[i];
	}
	return -1;
}

void set_map(const char *name, const void *key, const void *value)
{
	if (bpf_map_update_elem(map_fd(name), key, value, BPF_ANY))
		warn("cannot write the BPF map %s: %s", name, strerror(errno));
}

void delete_from_map(const char *name, const void *key)
{
	bpf_map_delete_elem(map_fd(name), key);
}

