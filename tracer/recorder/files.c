// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Files that the user names or the target can change, opened with that user's rights, never waited for (tracer/recording/user_files.py). */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "recorder.h"

static uid_t uid;
static gid_t gid;
static bool is_known;

void act_for_user_of(pid_t pid)
{
	char path[64];
	struct stat status;

	snprintf(path, sizeof(path), "/proc/%d", pid);
	if (stat(path, &status))
		return;
	uid = status.st_uid;
	gid = status.st_gid;
	is_known = true;
}

/* A place is opened first: that acts on nothing, while opening a device or a FIFO may. */
static int open_regular(const char *path, s64 most)
{
	int place = open(path, O_PATH | O_CLOEXEC), fd = -1;
	struct stat status;
	char again[64];

	if (place < 0)
		return -1;
	snprintf(again, sizeof(again), "/proc/self/fd/%d", place);
	if (fstat(place, &status) || !S_ISREG(status.st_mode))
		errno = EINVAL;
	else if (status.st_size > most)
		errno = EFBIG;
	else
		fd = open(again, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	close(place);
	return fd;
}

static int open_without_rights(const char *path, s64 most)
{
	int fd, error;

	read_as_user(true);
	fd = open_regular(path, most);
	error = errno;
	read_as_user(false);
	errno = error;
	return fd;
}

int open_as_user(const char *shown, s64 most)
{
	const char *path = opening_path(shown);
	gid_t groups[MOST_GROUPS];
	int fd, error, count, user, group;

	if (!is_known && !getuid()) {
		uid = caller();
		gid = uid ? atol(getenv("SUDO_GID")) : 0;
		is_known = true;
	}
	if (strstr(path, "/map_files/") || path != shown) /* what a process has mapped needs root's rights */
		return open_regular(path, most);
	if (getuid())
		return open_without_rights(path, most);
	if (!uid)
		return open_regular(path, most);
	count = getgroups(MOST_GROUPS, groups);
	if (count < 0 || syscall(SYS_setgroups, 0, NULL))
		return -1;
	group = setfsgid(gid);
	user = setfsuid(uid);
	fd = open_regular(path, most);
	error = errno;
	setfsuid(user);
	setfsgid(group);
	keep_few_rights(); /* with root's number all of its file capabilities are back */
	if (syscall(SYS_setgroups, (size_t)count, groups))
		fail("root's groups cannot be taken back: %s", strerror(errno));
	errno = error;
	return fd;
}
