// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Processes, what they have mapped, and libdw's view of it. */
#include <elfutils/libdwelf.h>
#include <errno.h>
#include <fcntl.h>
#include <gelf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "unwind.h"

const char *folder;
static struct process *processes;
static int process_count;
static json_t *replaced;

struct process *process_of(u32 pid)
{
	static int room;

	for (int i = 0; i < process_count; i++)
		if (processes[i].pid == pid)
			return &processes[i];
	if (process_count == room)
		processes = grown(processes, &room, sizeof(*processes));
	processes[process_count] = (struct process){.pid = pid};
	return &processes[process_count++];
}

/* Addresses may mean something else from now on. */
static void begin_anew(struct process *p)
{
	forget_rows(p);
	if (p->dwfl)
		dwfl_end(p->dwfl);
	p->dwfl = NULL;
	p->reported = 0;
	p->age++;
}

/* What a new mapping covers is gone. */
void add_mapping(struct process *p, struct mapping m)
{
	int kept = 0;

	for (int i = 0; i < p->count; i++) {
		struct mapping old = p->maps[i];

		if (old.start < m.start && m.start < old.end) {
			old.end = m.start;
			begin_anew(p);
		}
		if (old.start >= m.end || old.end <= m.start)
			p->maps[kept++] = old;
	}
	if (kept < p->count)
		begin_anew(p);
	p->count = kept;
	if (p->count == p->room)
		p->maps = grown(p->maps, &p->room, sizeof(*p->maps));
	p->maps[p->count++] = m;
}

void clear_mappings(struct process *p)
{
	p->count = 0;
	begin_anew(p);
}

const struct mapping *mapping_of(const struct process *p, u64 address)
{
	for (int i = p->count - 1; i >= 0; i--)
		if (p->maps[i].start <= address && address < p->maps[i].end)
			return &p->maps[i];
	return NULL;
}

static const char *vdso(void)
{
	static char path[4096];

	snprintf(path, sizeof(path), "%s/vdso.so", folder);
	return path;
}

/* The bias of a file's addresses, if this mapping shows one of its segments; false otherwise. */
static bool bias_of(Elf *elf, const struct mapping *m, u64 *bias)
{
	size_t count;
	GElf_Phdr segment;

	if (elf_getphdrnum(elf, &count))
		return false;
	for (size_t i = 0; i < count; i++) {
		if (!gelf_getphdr(elf, i, &segment) || segment.p_type != PT_LOAD || !(segment.p_flags & PF_X))
			continue;
		if (m->offset < segment.p_offset + segment.p_filesz && m->offset + (m->end - m->start) > segment.p_offset) {
			*bias = m->start - m->offset + segment.p_offset - segment.p_vaddr;
			return true;
		}
	}
	return false;
}

/* Whether a file is the one that was mapped: it may have been replaced since, or be another machine's. */
static bool is_same(Elf *elf, const struct stat *file, const struct mapping *m)
{
	const void *id;

	if (m->id_bytes)
		return dwelf_elf_gnu_build_id(elf, &id) == m->id_bytes && !memcmp(id, m->id, m->id_bytes);
	return !m->inode || m->inode == file->st_ino;
}

static void report(Dwfl *dwfl, const struct mapping *m)
{
	const char *other = json_string_value(json_object_get(replaced, m->path));
	const char *path = !strcmp(m->path, "[vdso]") ? vdso() : other ? other : m->path;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	struct stat file;
	u64 bias;
	Elf *elf;

	if (fd < 0)
		return;
	if (fstat(fd, &file) || !S_ISREG(file.st_mode)) {
		close(fd);
		return;
	}
	elf = elf_begin(fd, ELF_C_READ_MMAP, NULL);
	if (!elf || (path == m->path && !is_same(elf, &file, m)) || !bias_of(elf, m, &bias) || !dwfl_report_elf(dwfl, m->path, path, fd, bias, true)) {
		elf_end(elf);
		close(fd);
		return;
	}
	elf_end(elf);
}

void prepare(struct process *p)
{
	static char *no_path = NULL;
	static const Dwfl_Callbacks finding = {.find_elf = dwfl_build_id_find_elf, .find_debuginfo = dwfl_standard_find_debuginfo,
					       .section_address = dwfl_offline_section_address, .debuginfo_path = &no_path};

	if (p->dwfl && p->reported == p->count)
		return;
	if (!p->dwfl) {
		p->dwfl = dwfl_begin(&finding);
		dwfl_report_begin(p->dwfl);
	} else {
		forget_rows(p); /* nothing may have been known at an address that a file covers now */
		dwfl_report_begin_add(p->dwfl);
	}
	for (; p->reported < p->count; p->reported++)
		report(p->dwfl, &p->maps[p->reported]);
	dwfl_report_end(p->dwfl, NULL, NULL);
}

void read_replaced(FILE *lines)
{
	char line[8192], *tab;

	replaced = json_object();
	while (fgets(line, sizeof(line), lines)) {
		line[strcspn(line, "\n")] = 0;
		tab = strchr(line, '\t');
		if (tab) {
			*tab = 0;
			json_object_set_new(replaced, line, json_string(tab + 1));
		}
	}
}
