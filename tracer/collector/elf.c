// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What identifies a file wherever it is stored: its build id, or the XXH3 of its content if it has none. */
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "collect.h"

/* Maps a file for reading; NULL if it is not a 64-bit ELF file. */
static const Elf64_Ehdr *map_elf(const char *path, size_t *size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat status;
	void *data = MAP_FAILED;

	if (fd >= 0 && !fstat(fd, &status) && S_ISREG(status.st_mode) && status.st_size >= (off_t)sizeof(Elf64_Ehdr)) {
		*size = status.st_size;
		data = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, fd, 0);
	}
	if (fd >= 0)
		close(fd);
	if (data == MAP_FAILED)
		return NULL;
	if (!memcmp(data, ELFMAG, SELFMAG) && ((Elf64_Ehdr *)data)->e_ident[EI_CLASS] == ELFCLASS64)
		return data;
	munmap(data, *size);
	return NULL;
}

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

static bool find_build_id(const Elf64_Ehdr *elf, size_t size, char *id, size_t bytes)
{
	const Elf64_Phdr *segments = (const void *)((const u8 *)elf + elf->e_phoff);

	if (elf->e_phoff > size || elf->e_phnum * sizeof(*segments) > size - elf->e_phoff)
		return false;
	for (u32 i = 0; i < elf->e_phnum; i++) {
		const Elf64_Phdr *each = &segments[i];

		if (each->p_type == PT_NOTE && each->p_offset < size && each->p_filesz <= size - each->p_offset &&
		    build_id_in((const u8 *)elf + each->p_offset, each->p_filesz, id, bytes))
			return true;
	}
	return false;
}

bool identify(const char *path, char *id, size_t bytes)
{
	size_t size;
	const Elf64_Ehdr *elf = map_elf(path, &size);

	if (!elf)
		return false;
	if (!find_build_id(elf, size, id, bytes)) {
		strcpy(id, "xxh3:");
		digest(elf, size, id + strlen(id));
	}
	munmap((void *)elf, size);
	return true;
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
