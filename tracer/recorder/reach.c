// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The files that a process maps, opens or executes, by paths that open them here: its root may be another one. */
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "recorder.h"

#define MOST_WAYS 256
#define MEMORY "/memfd:" /* the kernel's prefix for the names of files in memory */
#define DELETED " (deleted)"

static struct way {
	char *shown, *way;
} ways[MOST_WAYS];
static int way_count;

static bool ends_with(const char *text, const char *end)
{
	size_t length = strlen(text), its = strlen(end);

	return length >= its && !strcmp(text + length - its, end);
}

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
	m->is_writable = flags[1] == 'w';
	snprintf(m->path, sizeof(m->path), "%s", line + at);
	return true;
}

static bool is_inode(const char *path, u64 inode)
{
	struct stat status;

	return !stat(path, &status) && status.st_ino == inode;
}

const char *opening_path(const char *shown)
{
	for (int i = 0; i < way_count; i++) {
		if (!strcmp(ways[i].shown, shown))
			return ways[i].way;
	}
	return shown;
}

/* From now on, the file that is shown under a name is opened by another path; the first one stays. */
static void note_way(const char *shown, const char *way)
{
	if (way_count < MOST_WAYS && !strcmp(opening_path(shown), shown) && strcmp(shown, way))
		ways[way_count++] = (struct way){strdup(shown), strdup(way)};
}

/* A file in memory has no path: its name and inode, since several may share a name. */
static void name_in_memory(const char *name, u64 inode, char *shown)
{
	int length = strcspn(name + strlen(MEMORY), " ");

	snprintf(shown, PATH_MOST, MEMORY "%llu/%.*s", (unsigned long long)inode, length, name + strlen(MEMORY));
}

/* Finds a path that opens a mapped file here: its own, one below the process's root, or the process's mapping itself. */
static void find_way(pid_t pid, struct mapping *m)
{
	char below[PATH_MOST + 32], way[64], shown[PATH_MOST];

	if (is_inode(m->path, m->inode))
		return;
	snprintf(below, sizeof(below), "/proc/%d/root%.*s", pid, PATH_MOST - 1, m->path);
	if (is_inode(below, m->inode)) {
		snprintf(m->path, sizeof(m->path), "%.*s", PATH_MOST - 1, below);
		return;
	}
	snprintf(way, sizeof(way), "/proc/%d/map_files/%lx-%lx", pid, m->start, m->end);
	if (!strncmp(m->path, MEMORY, strlen(MEMORY)))
		name_in_memory(m->path, m->inode, shown);
	else
		snprintf(shown, sizeof(shown), "%.*s%s", PATH_MOST - 20, m->path, ends_with(m->path, DELETED) ? "" : " (as mapped)");
	note_way(shown, way);
	strcpy(m->path, shown);
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
	find_way(pid, &m);
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

/* The number of a descriptor that a path names: /dev/fd/N, /proc/self/fd/N ...; -1 if it names none. */
static int descriptor_in(const char *name)
{
	static const char *const forms[] = {"/dev/fd/%d%n", "/proc/self/fd/%d%n", "/proc/thread-self/fd/%d%n", "/proc/%*d/fd/%d%n"};

	for (size_t i = 0; i < sizeof(forms) / sizeof(*forms); i++) {
		int number, end = 0;

		if (sscanf(name, forms[i], &number, &end) == 1 && end && !name[end])
			return number;
	}
	return -1;
}

/* A file that a process has open; one in memory is kept open here, as the process may close it once its library is loaded. */
static bool open_of(pid_t pid, int number, char *path)
{
	char link[64], name[PATH_MOST];
	struct stat status;
	ssize_t length;
	int fd;

	snprintf(link, sizeof(link), "/proc/%d/fd/%d", pid, number);
	length = readlink(link, name, PATH_MOST - 1);
	name[length < 0 ? 0 : length] = 0;
	strcpy(path, name);
	if (length <= 0 || strncmp(name, MEMORY, strlen(MEMORY)))
		return length > 0;
	fd = open(link, O_PATH | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &status))
		return false;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	name_in_memory(name, status.st_ino, path);
	if (strcmp(opening_path(path), path))
		close(fd);
	note_way(path, link);
	return true;
}

/* The path below a process's root, with links resolved there; false if there is no such file. */
static bool within_root(pid_t pid, const char *here, char *path)
{
	struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT};
	char text[PATH_MOST + 64];
	ssize_t length = -1;
	int root, fd;

	snprintf(text, sizeof(text), "/proc/%d/root", pid);
	root = open(text, O_PATH | O_DIRECTORY | O_CLOEXEC);
	fd = root < 0 ? -1 : syscall(SYS_openat2, root, here, &how, sizeof(how)); /* Linux 5.6 */
	if (fd >= 0) {
		snprintf(text, sizeof(text), "/proc/self/fd/%d", fd);
		length = readlink(text, path, PATH_MOST - 1);
		close(fd);
	}
	if (root >= 0)
		close(root);
	if (length <= 0)
		return false;
	path[length] = 0;
	snprintf(text, sizeof(text), "/proc/%d/root%.*s", pid, PATH_MOST - 1, path);
	snprintf(path, PATH_MOST, "%.*s", PATH_MOST - 1, text);
	return true;
}

/* The file that a process opens under a name, with links resolved, by a path that opens here. */
bool opened_by(pid_t pid, const char *name, char *path)
{
	char here[2 * PATH_MOST], link[64], there[PATH_MOST], *real;
	int number = descriptor_in(name), length;
	struct stat ours, its;

	if (number >= 0)
		return open_of(pid, number, path);
	snprintf(link, sizeof(link), "/proc/%d/cwd", pid);
	length = name[0] == '/' ? 0 : readlink(link, here, PATH_MOST - 2);
	if (length < 0)
		return false;
	snprintf(here + length, sizeof(here) - length, "%s%s", length ? "/" : "", name);
	if (!within_root(pid, here, there))
		*there = 0;
	if (!stat(here, &ours) && (!*there || stat(there, &its) || (ours.st_ino == its.st_ino && ours.st_dev == its.st_dev))) {
		real = realpath(here, NULL);
		snprintf(path, PATH_MOST, "%s", real ? real : "");
		free(real);
	} else {
		strcpy(path, there);
	}
	return path[0];
}

void each_mapping(pid_t pid, void (*act)(const struct mapping *mapping, void *context), void *context)
{
	struct mapping m;
	FILE *maps = open_maps(pid);

	while (maps && next_mapping(maps, &m)) {
		if (m.path[0] == '/')
			find_way(pid, &m);
		act(&m, context);
	}
	if (maps)
		fclose(maps);
}
