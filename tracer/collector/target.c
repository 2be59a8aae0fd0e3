// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The traced program: started but held until its probes are attached, or followed by process id; its threads and files. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <libgen.h>
#include <pwd.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "collect.h"

#define MOST_GUARDED 4096
#define MOST_GROUPS 64
#define MOST_TASKS 4096
#define NOT_EXECUTED 127

static int guard_pipe = -1, gate = -1, failure = -1;
static u64 cpu_before; /* of a followed process */
static pid_t guard_pid;

/* A small process that resumes the target if the collector dies while the target is stopped. */
static void watch_over(int from)
{
	static pid_t pids[MOST_GUARDED];
	int count = 0, each;

	setsid();
	signal(SIGINT, SIG_IGN);
	signal(SIGTERM, SIG_IGN);
	while (read(from, &each, sizeof(each)) == sizeof(each)) {
		for (int i = 0; i < count; i++)
			if (pids[i] == -each)
				pids[i--] = pids[--count];
		if (each > 0 && count < MOST_GUARDED)
			pids[count++] = each;
	}
	if (count)
		usleep(50000);
	for (int i = 0; i < count; i++)
		kill(pids[i], SIGCONT);
	_exit(0);
}

void guard_begin(void)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC))
		fail("no pipe: %s", strerror(errno));
	guard_pid = fork();
	if (guard_pid < 0)
		fail("no process: %s", strerror(errno));
	if (!guard_pid) {
		close(ends[1]);
		watch_over(ends[0]);
	}
	close(ends[0]);
	guard_pipe = ends[1];
}

void guard(pid_t pid, bool watch)
{
	int each = watch ? pid : -pid;

	if (write(guard_pipe, &each, sizeof(each)) < 0)
		warn("the guard process has ended: if this process is killed, the target may stay stopped");
}

void guard_end(void)
{
	close(guard_pipe);
	waitpid(guard_pid, NULL, 0);
}

/* A user's groups according to /etc/group. */
static int groups_of(const char *user, gid_t *groups, int most)
{
	FILE *file = fopen("/etc/group", "re");
	struct group *group;
	int count = 0;

	while (file && (group = fgetgrent(file)))
		for (char **member = group->gr_mem; *member && count < most; member++)
			if (!strcmp(*member, user))
				groups[count++] = group->gr_gid;
	if (file)
		fclose(file);
	return count;
}

static void take_home(uid_t uid)
{
	FILE *file = fopen("/etc/passwd", "re");
	struct passwd *user;

	while (file && (user = fgetpwent(file)))
		if (user->pw_uid == uid) {
			setenv("HOME", user->pw_dir, 1);
			setenv("USER", user->pw_name, 1);
			setenv("LOGNAME", user->pw_name, 1);
		}
	if (file)
		fclose(file);
}

/* The user who invoked sudo: the command runs as them, as with the host's tracer. */
uid_t caller(void)
{
	const char *uid = getenv("SUDO_UID");

	return !getuid() && uid && getenv("SUDO_GID") && getenv("SUDO_USER") ? (uid_t)atol(uid) : getuid();
}

void be_urgent(pid_t pid, bool urgent)
{
	struct sched_param parameter = {.sched_priority = urgent};

	if (pid) /* where it is forbidden, the target waits longer */
		sched_setscheduler(pid, urgent ? SCHED_RR | SCHED_RESET_ON_FORK : SCHED_OTHER, &parameter);
}

void act_as_caller(bool as_caller)
{
	if (caller() == getuid())
		return;
	setfsgid(as_caller ? (gid_t)atol(getenv("SUDO_GID")) : getgid());
	setfsuid(as_caller ? caller() : getuid()); /* the kernel drops root's file capabilities with it, and restores them later */
}

/* Drops root; false if the command would still run as root. */
static bool become_the_caller(void)
{
	gid_t groups[MOST_GROUPS];

	if (caller() == getuid())
		return true;
	take_home(caller());
	if (setgroups(groups_of(getenv("SUDO_USER"), groups, MOST_GROUPS), groups) || setgid(atol(getenv("SUDO_GID"))))
		return false;
	return !setuid(caller());
}

static void be_the_command(int held, int told, char **command)
{
	char byte;
	int error;

	close(gate);
	if (read(held, &byte, 1) != 1)
		_exit(NOT_EXECUTED);
	signal(SIGINT, SIG_DFL);
	signal(SIGTERM, SIG_DFL);
	signal(SIGPIPE, SIG_DFL);
	signal(SIGXFSZ, SIG_DFL);
	if (become_the_caller())
		execvp(command[0], command);
	error = errno;
	if (write(told, &error, sizeof(error)) < 0)
		error = 0;
	_exit(NOT_EXECUTED);
}

void start_target(struct target *target, char **command)
{
	int held[2], told[2];

	if (pipe2(held, O_CLOEXEC) || pipe2(told, O_CLOEXEC))
		fail("no pipe: %s", strerror(errno));
	gate = held[1];
	target->began_ns = now_ns();
	target->started_here = true;
	target->pid = fork();
	if (target->pid < 0)
		fail("no process: %s", strerror(errno));
	if (!target->pid)
		be_the_command(held[0], told[1], command);
	close(held[0]);
	close(told[1]);
	failure = told[0];
}

/* CPU time of all threads of a process since its begin; 0 if it is gone. */
static u64 cpu_of(pid_t pid)
{
	struct timespec t = {0};
	clockid_t clock;

	if (clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &t))
		return 0;
	return t.tv_sec * NS_PER_S + t.tv_nsec;
}

void follow_target(struct target *target, pid_t pid)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	if (access(path, F_OK))
		fail("no process %d; it may have ended", pid);
	target->pid = pid;
	target->began_ns = now_ns();
	cpu_before = cpu_of(pid);
}

/* Lets the command run. */
void release_target(struct target *target)
{
	if (!target->started_here)
		return;
	if (write(gate, "g", 1) != 1)
		fail("the command has ended before it began");
	close(gate);
	gate = -1;
	fcntl(failure, F_SETFL, O_NONBLOCK);
}

/* True while it lives. */
bool poll_target(struct target *target)
{
	struct rusage used;
	char path[64];
	int error;
	u64 cpu;

	if (target->over)
		return false;
	if (!target->started_here) {
		snprintf(path, sizeof(path), "/proc/%d/task", target->pid);
		target->over = access(path, F_OK) != 0;
	}
	if (!target->over && (cpu = cpu_of(target->pid)) > cpu_before)
		target->cpu_ns = cpu - cpu_before;
	if (!target->started_here || wait4(target->pid, &target->status, WNOHANG, &used) != target->pid)
		return !target->over;
	target->over = true;
	target->cpu_ns = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * NS_PER_S;
	target->cpu_ns += (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1000ULL;
	if (read(failure, &error, sizeof(error)) == sizeof(error))
		warn("the command cannot be run: %s; give its full path", strerror(error));
	return false;
}

int tasks_of(pid_t pid, pid_t *tids, int most)
{
	char path[64];
	int count = 0;
	DIR *folder;
	struct dirent *entry;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	folder = opendir(path);
	while (folder && count < most && (entry = readdir(folder)))
		if (entry->d_name[0] != '.')
			tids[count++] = atoi(entry->d_name);
	if (folder)
		closedir(folder);
	return count;
}

void each_descendant(pid_t pid, void (*act)(pid_t pid, void *context), void *context)
{
	pid_t *tids = calloc(MOST_TASKS, sizeof(*tids));
	int count = tids ? tasks_of(pid, tids, MOST_TASKS) : 0, child;

	act(pid, context);
	for (int i = 0; i < count; i++) {
		char path[96];
		FILE *children;

		snprintf(path, sizeof(path), "/proc/%d/task/%d/children", pid, tids[i]);
		children = fopen(path, "re");
		while (children && fscanf(children, "%d", &child) == 1)
			each_descendant(child, act, context);
		if (children)
			fclose(children);
	}
	free(tids);
}

int name_of(pid_t pid, pid_t tid, char *name, size_t bytes)
{
	char path[64];
	int fd;
	ssize_t length;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/comm", pid, tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	length = fd < 0 ? -1 : read(fd, name, bytes - 1);
	if (fd >= 0)
		close(fd);
	if (length <= 0)
		return -1;
	name[length - (name[length - 1] == '\n')] = 0;
	return 0;
}

struct mapping {
	u64 start, end, offset, inode;
	bool is_code;
	u32 major, minor;
	char path[PATH_MOST];
};

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

void each_mapped(pid_t pid, void (*act)(const char *path, void *context), void *context)
{
	struct mapping m;
	FILE *maps = open_maps(pid);

	while (maps && next_mapping(maps, &m)) {
		if (!m.is_code || m.path[0] != '/')
			continue;
		way_to(pid, &m);
		act(m.path, context);
	}
	if (maps)
		fclose(maps);
}
