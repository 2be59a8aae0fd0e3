// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The files that a process maps, opens or executes, by paths that open them here: its root may be another one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "collect.h"

static bool next_mapping(FILE *maps, struct mapping *m)
{
	char line[PATH_MOST + 128], flags[8];
	int at = 0;

	if (!fgets(line, sizeof(line), maps))
		return false;
	line[strcspn(line, "\n")] = 0;
	if (sscanf(line, "%lx-%lx %7s %lx %x:%x %lu %n", &m->start, &m->end, flags, &m->offset, &m->major, &m->minor, &m->inode, &at) < 7)
		return false;
	m->is_code = flags[2] == 'x';
	snprintf(m->path, sizeof(m->path), "%s", line + at);
	return true;
}

static bool is_inode(const char *path, u64 inode)
{
	struct stat status;

	return !stat(path, &status) && status.st_ino == inode;
}

/* Finds a path that opens a mapped file here: its own, one below the process's root, or the process's mapping itself. */
static void way_to(pid_t pid, struct mapping *m)
{
	char below[PATH_MOST + 32];

	if (is_inode(m->path, m->inode))
		return;
	snprintf(below, sizeof(below), "/proc/%d/root%s", pid, m->path);
	if (!is_inode(below, m->inode))
		snprintf(below, sizeof(below), "/proc/%d/map_files/%lx-%lx", pid, m->start, m->end);
	snprintf(m->path, sizeof(m->path), "%.*s", PATH_MOST - 1, below);
}

static FILE *open_maps(pid_t pid)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	return fopen(path, "re");
}

bool place_of(pid_t pid, u64 address, char *path, u64 *offset)
{
	struct mapping m;
	FILE *maps = open_maps(pid);
	bool found = false;

	while (maps && !found && next_mapping(maps, &m))
		found = m.is_code && m.path[0] == '/' && address >= m.start && address < m.end;
	if (maps)
		fclose(maps);
	if (!found)
		return false;
	way_to(pid, &m);
	strcpy(path, m.path);
	*offset = address - m.start + m.offset;
	return true;
}

bool program_of(pid_t pid, char *path)
{
	char link[64];
	ssize_t length;
	struct stat status;

	snprintf(link, sizeof(link), "/proc/%d/exe", pid);
	length = readlink(link, path, PATH_MOST - 1);
	if (length < 0 || stat(link, &status))
		return false;
	path[length] = 0;
	if (!is_inode(path, status.st_ino))
		strcpy(path, link);
	return true;
}

/* The file that a process opens under a name, with links resolved, by a path that opens here. */
bool opened_by(pid_t pid, const char *name, char *path)
{
	char here[PATH_MOST + 64], *real;

	if (name[0] == '/')
		snprintf(here, sizeof(here), "%s", name);
	else
		snprintf(here, sizeof(here), "/proc/%d/cwd/%s", pid, name);
	real = realpath(here, NULL);
	if (!real && name[0] == '/') {
		snprintf(here, sizeof(here), "/proc/%d/root%s", pid, name);
		real = access(here, R_OK) ? NULL : strdup(here);
	}
	snprintf(path, PATH_MOST, "%s", real ? real : "");
	free(real);
	return path[0];
}

void each_mapping(pid_t pid, void (*act)(const struct mapping *mapping, void *context), void *context)
{
	struct mapping m;
	FILE *maps = open_maps(pid);

	while (maps && next_mapping(maps, &m)) {
		if (m.path[0] == '/')
			way_to(pid, &m);
		act(&m, context);
	}
	if (maps)
		fclose(maps);
}
