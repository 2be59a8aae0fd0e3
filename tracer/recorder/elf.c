// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What identifies a file wherever it is stored: its build id, or the XXH3 of its content if it has none. */
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "recorder.h"

#define MOST_SEGMENTS 4096
#define MOST_NOTES (1U << 20)  /* bytes of a segment with notes */
#define MOST_HASHED (1LL << 30) /* bytes of a file without a build id */

/* Searches notes for the build id and writes it as hexadecimal digits. */
static bool build_id_in(const u8 *notes, size_t size, char *id, size_t bytes)
{
	size_t at = 0;

	while (at + sizeof(Elf64_Nhdr) <= size) {
		const Elf64_Nhdr *note = (const void *)(notes + at);
		size_t text = at + sizeof(*note) + ((note->n_namesz + 3UL) & ~3UL);

		if (text + note->n_descsz > size)
			return false;
		if (note->n_type == NT_GNU_BUILD_ID && note->n_namesz == 4 && 2UL * note->n_descsz < bytes) {
			for (u32 i = 0; i < note->n_descsz; i++)
				sprintf(id + 2 * i, "%02x", notes[text + i]);
			return true;
		}
		at = text + ((note->n_descsz + 3UL) & ~3UL);
	}
	return false;
}

static bool read_build_id(int fd, const Elf64_Phdr *segment, char *id, size_t bytes)
{
	u8 *notes = segment->p_filesz <= MOST_NOTES ? malloc(segment->p_filesz) : NULL;
	bool found = notes && pread(fd, notes, segment->p_filesz, segment->p_offset) == (ssize_t)segment->p_filesz &&
		     build_id_in(notes, segment->p_filesz, id, bytes);

	free(notes);
	return found;
}

static bool find_build_id(int fd, const Elf64_Ehdr *elf, char *id, size_t bytes)
{
	static Elf64_Phdr segments[MOST_SEGMENTS];
	ssize_t size = elf->e_phnum * sizeof(*segments);

	if (elf->e_phnum > MOST_SEGMENTS || pread(fd, segments, size, elf->e_phoff) != size)
		return false;
	for (u32 i = 0; i < elf->e_phnum; i++)
		if (segments[i].p_type == PT_NOTE && read_build_id(fd, &segments[i], id, bytes))
			return true;
	return false;
}

/* Nothing is mapped: the target may cut its file off meanwhile. */
bool identify(const char *path, char *id, size_t bytes)
{
	int fd = open_as_user(path, INT64_MAX);
	bool known = false;
	Elf64_Ehdr elf;

	if (fd < 0)
		return false;
	if (pread(fd, &elf, sizeof(elf), 0) == sizeof(elf) && !memcmp(&elf, ELFMAG, SELFMAG) && elf.e_ident[EI_CLASS] == ELFCLASS64) {
		known = find_build_id(fd, &elf, id, bytes);
		if (!known) {
			strcpy(id, "xxh3:");
			known = digest_file(fd, MOST_HASHED, id + strlen(id));
		}
	}
	close(fd);
	return known;
}

struct wanted {
	u64 address;
	s64 offset;
};

static int look(struct dl_phdr_info *info, size_t size, void *context)
{
	struct wanted *wanted = context;

	(void)size;
	for (u32 i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *each = &info->dlpi_phdr[i];
		u64 start = info->dlpi_addr + each->p_vaddr;

		if (each->p_type == PT_LOAD && wanted->address >= start && wanted->address < start + each->p_filesz)
			wanted->offset = wanted->address - start + each->p_offset;
	}
	return 0;
}

s64 own_offset(const void *function)
{
	struct wanted wanted = {(u64)function, -1};

	dl_iterate_phdr(look, &wanted);
	return wanted.offset;
}
