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
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "recorder.h"

#define MOST_GUARDED 4096
#define MOST_TASKS 4096
#define NOT_EXECUTED 127

/* Of a command that is repeated: how often it began, and whether it shall not again. */
static struct repetition {
	volatile u32 begun;
	volatile bool is_over;
	volatile pid_t pid;
	volatile u64 cpu_ns; /* of those that have ended */
} *repetition;

static int guard_pipe = -1, gate = -1, failure = -1;
static u64 cpu_before; /* of a followed process */
static pid_t guard_pid;

/* A small process that resumes the target if the recorder dies while the target is stopped. */
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
	if (getuid())
		read_as_user(as_caller);
	if (caller() == getuid())
		return;
	setfsgid(as_caller ? (gid_t)atol(getenv("SUDO_GID")) : getgid());
	setfsuid(as_caller ? caller() : getuid()); /* the kernel drops root's file capabilities with it, and restores all of them later */
	if (!as_caller)
		keep_few_rights();
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

static u64 cpu_ns_of(const struct rusage *used)
{
	return (used->ru_utime.tv_sec + used->ru_stime.tv_sec) * NS_PER_S + (used->ru_utime.tv_usec + used->ru_stime.tv_usec) * 1000ULL;
}

static void pass_on(int number)
{
	repetition->is_over = true;
	kill(repetition->pid, number);
}

/* Runs the command again and again, in one process each, until it fails or enough was seen; ends as the last of them did. */
static void repeat(int told, char **command)
{
	pid_t recorder = getppid();
	struct rusage used;
	int status = 0, error;

	signal(SIGTERM, pass_on);
	signal(SIGINT, pass_on);
	while (!status && !repetition->is_over && getppid() == recorder) {
		repetition->begun++;
		repetition->pid = fork();
		if (!repetition->pid) {
			signal(SIGINT, SIG_DFL);
			signal(SIGTERM, SIG_DFL);
			execvp(command[0], command);
			error = errno;
			_exit(write(told, &error, sizeof(error)) < 0 ? FAILED : NOT_EXECUTED);
		}
		if (repetition->pid < 0)
			_exit(FAILED);
		close(told);
		while (wait4(repetition->pid, &status, 0, &used) < 0 && errno == EINTR)
			;
		repetition->cpu_ns += cpu_ns_of(&used);
	}
	if (WIFSIGNALED(status)) {
		signal(WTERMSIG(status), SIG_DFL);
		raise(WTERMSIG(status));
	}
	_exit(WEXITSTATUS(status));
}

static void be_the_command(int held, int told, char **command)
{
	char byte;
	int error;

	signal(SIGINT, SIG_DFL);
	signal(SIGTERM, SIG_DFL);
	signal(SIGPIPE, SIG_DFL);
	signal(SIGXFSZ, SIG_DFL);
	close(gate);
	if (read(held, &byte, 1) != 1)
		_exit(NOT_EXECUTED);
	leave_rights();
	if (become_the_caller()) {
		if (repetition)
			repeat(told, command);
		execvp(command[0], command);
	}
	error = errno;
	if (write(told, &error, sizeof(error)) < 0)
		error = 0;
	_exit(NOT_EXECUTED);
}

void start_target(struct target *target, char **command, bool repeats)
{
	int held[2], told[2];

	if (repeats)
		repetition = mmap(NULL, sizeof(*repetition), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (repetition == MAP_FAILED)
		fail("no memory: %s", strerror(errno));

	if (pipe2(held, O_CLOEXEC) || pipe2(told, O_CLOEXEC))
		fail("no pipe: %s", strerror(errno));
	gate = held[1];
	target->began_ns = now_ns();
	target->started_here = true;
	target->command = command[0];
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

void repeat_no_more(void)
{
	if (repetition)
		repetition->is_over = true;
}

u32 commands_begun(void)
{
	return repetition ? repetition->begun : 1;
}

/* Lets the command run. */
void release_target(struct target *target)
{
	if (!target->started_here)
		return;
	if (write(gate, "g", 1) != 1 && errno != EPIPE) /* Ctrl-C has ended it */
		fail("the command cannot be let go: %s", strerror(errno));
	close(gate);
	gate = -1;
	fcntl(failure, F_SETFL, O_NONBLOCK);
}

/* One that its parent has not waited for stays in /proc, as does one whose first thread has ended before the others. */
static bool has_ended(pid_t pid)
{
	pid_t tids[2];
	char path[64], text[1024], *name_end;
	FILE *file;

	if (tasks_of(pid, tids, 2) > 1)
		return false;
	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	file = fopen(path, "re");
	text[file ? fread(text, 1, sizeof(text) - 1, file) : 0] = 0;
	if (file)
		fclose(file);
	name_end = strrchr(text, ')');
	return !name_end || name_end[2] == 'Z' || name_end[2] == 'X';
}

/* True while it lives. */
bool poll_target(struct target *target)
{
	struct rusage used;
	int error;
	u64 cpu;

	if (target->over)
		return false;
	if (!target->started_here)
		target->over = has_ended(target->pid);
	cpu = target->over ? 0 : cpu_of(target->pid);
	if (repetition && !target->over)
		cpu += repetition->cpu_ns + cpu_of(repetition->pid);
	if (cpu > cpu_before)
		target->cpu_ns = cpu - cpu_before;
	if (!target->started_here || wait4(target->pid, &target->status, WNOHANG, &used) != target->pid)
		return !target->over;
	target->over = true;
	target->cpu_ns = cpu_ns_of(&used);
	if (read(failure, &error, sizeof(error)) == sizeof(error))
		target->never_ran = true;
	if (target->never_ran)
		say("cannot run '%s': %s; give the full path or check $PATH", target->command, strerror(error));
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
