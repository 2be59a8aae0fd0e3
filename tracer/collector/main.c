// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * moescope-collect: records by a plan, on a machine without Python. The plan is made on a host (`moescope plan`); the
 * recording is read on a host, like any other (docs/devices.md).
 */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "collect.h"

#define RING_MIB 8 /* a process that maps both has them counted twice: 32 MiB resident */
#define FIRST_MANIFEST_NS (5 * NS_PER_S)
#define WATCHFUL_NS (NS_PER_S / 100)
#define RAREST_MANIFEST_NS (60 * NS_PER_S)
#define MOST_TASKS 4096
#define FIRST_PID_NAMESPACE 0xEFFFFFFCul /* the initial one: PROC_PID_INIT_INO of include/linux/proc_ns.h */

static volatile sig_atomic_t asked_to_stop;

static const char usage[] =
	"usage: moescope-collect --plan FILE -o FOLDER [options] -- COMMAND ARGUMENTS\n"
	"       moescope-collect --plan FILE -o FOLDER [options] --pid PID\n"
	"       moescope-collect --probe-features > FILE\n"
	"       moescope-collect --identify < FILE\n"
	"\n"
	"Records according to a plan; `moescope plan` writes it on a host, which also reads the recording.\n"
	"  -p, --plan FILE       what to attach\n"
	"  --planner OUT,IN      descriptors on which questions are written and answers read (docs/devices.md):\n"
	"                        what the plan does not know is asked there, and the plan itself unless --plan gives it\n"
	"  -o, --output FOLDER   new folder of the recording\n"
	"  --pid PID             follow a running process, with its children\n"
	"  --duration SECONDS    how long to record (default: to the end)\n"
	"  --tokens N            stop recording after N token steps\n"
	"  --ring-mib N          size of each of the two rings, a power of two (default: 8)\n"
	"  --btf FILE            BTF types for a kernel without built-in BTF\n"
	"  --probe-features      print this machine's features, for `moescope plan --features`\n"
	"  --identify            print the build ids of programs and libraries, whose paths are read line by line\n"
	"  --version             print the version and the checksum of its programs' sources\n"
	"Exit code: 0 good; 1 records were lost or the command failed; 2 nothing or only a part was recorded.\n";

static void stop(int number)
{
	(void)number;
	asked_to_stop = 1;
}

static void make_folder(const char *folder)
{
	char manifest[PATH_MOST];

	snprintf(manifest, sizeof(manifest), "%s/manifest.json", folder);
	act_as_caller(true);
	if (mkdir(folder, 0755) && errno != EEXIST)
		fail("cannot make %s: %s", folder, strerror(errno));
	if (!access(manifest, F_OK))
		fail("%s already holds a recording: give another folder with -o", folder);
	act_as_caller(false);
}

static void print_features(void)
{
	char *text = json_dumps(features(), 0);

	puts(text);
	free(text);
	exit(0);
}

/*
 * Prints build id, or content's hash, and path with links resolved; omits files of other kinds. Files as a process sees them are
 * accessed through /proc, where its root is a link that leads back to ours.
 */
static void print_identities(void)
{
	char path[PATH_MOST], id[64], *real;

	while (fgets(path, sizeof(path), stdin)) {
		path[strcspn(path, "\n")] = 0;
		real = strncmp(path, "/proc/", 6) ? realpath(path, NULL) : strdup(path);
		if (real && identify(real, id, sizeof(id)))
			printf("%s %s\n", id, real);
		free(real);
	}
	exit(0);
}

static void check(struct choice *choice, const char *plan)
{
	u64 mib = choice->ring_bytes >> 20;
	struct stat pids;

	if ((!plan && choice->questions < 0) || !choice->folder || (!choice->pid == !choice->command)) {
		fputs(usage, stderr);
		exit(2);
	}
	if (!mib || mib & (mib - 1))
		fail("--ring-mib %llu is not a power of two", (unsigned long long)mib);
	if (geteuid())
		fail("not root: probes need root (on Android: a root shell; elsewhere: sudo)");
	if (!stat("/proc/self/ns/pid", &pids) && pids.st_ino != FIRST_PID_NAMESPACE)
		fail("in a PID namespace of its own (a container), where programs have other numbers than in the kernel: give it the host's");
	choice->plan = plan ? read_plan(plan) : NULL;
	if (choice->questions >= 0)
		begin_planning(choice->questions, choice->answers, &choice->plan);
	merge_into_manifest(json_object_get(choice->plan, "manifest"));
	check_plan(choice->plan, plan ? plan : "the planner's plan");
}

static void read_options(int argc, char **argv, struct choice *choice)
{
	static const struct option options[] = {{"plan", 1, 0, 'p'},	 {"output", 1, 0, 'o'},		{"pid", 1, 0, 'P'},
						{"duration", 1, 0, 'd'}, {"ring-mib", 1, 0, 'r'},	{"btf", 1, 0, 'b'},
						{"help", 0, 0, 'h'},	 {"probe-features", 0, 0, 'f'}, {"version", 0, 0, 'v'},
						{"identify", 0, 0, 'i'}, {"tokens", 1, 0, 't'},	{"planner", 1, 0, 'a'}, {0, 0, 0, 0}};
	const char *plan = NULL;
	int each;

	choice->ring_bytes = RING_MIB << 20;
	choice->questions = choice->answers = -1;
	while ((each = getopt_long(argc, argv, "+p:o:h", options, NULL)) != -1) {
		switch (each) {
		case 'p': plan = optarg; break;
		case 'a':
			if (sscanf(optarg, "%d,%d", &choice->questions, &choice->answers) != 2)
				fail("--planner %s: give two descriptors, OUT,IN", optarg);
			break;
		case 'o': choice->folder = optarg; break;
		case 'P': choice->pid = atoi(optarg); break;
		case 'd': choice->duration_s = atof(optarg); break;
		case 't': choice->tokens = strtoull(optarg, NULL, 10); break;
		case 'r': choice->ring_bytes = strtoull(optarg, NULL, 10) << 20; break;
		case 'b': choice->btf = optarg; break;
		case 'f': print_features(); break;
		case 'i': print_identities(); break;
		case 'v': printf("%s (programs %s)\n", VERSION, SOURCES); exit(0);
		case 'h': fputs(usage, stdout); exit(0);
		default: fputs(usage, stderr); exit(2);
		}
	}
	choice->command = optind < argc ? argv + optind : NULL;
	check(choice, plan);
}

static void attach_mapped(const char *path, void *context)
{
	json_t *prefixes = context, *prefix;
	const char *name = strrchr(path, '/') + 1;
	size_t index;

	json_array_foreach(prefixes, index, prefix) {
		if (!strncmp(name, json_string_value(prefix), json_string_length(prefix)))
			attach_file(path, false);
	}
}

/* Registers a process's threads as the target's; if it runs already, attaches to what it has mapped. */
static void adopt(pid_t pid, void *context)
{
	const struct choice *choice = context;
	static pid_t tids[MOST_TASKS];
	struct traced *nothing = calloc(1, sizeof(*nothing));
	int count = tasks_of(pid, tids, MOST_TASKS);
	char program[PATH_MOST];

	guard(pid, true);
	for (int i = 0; i < count; i++) {
		set_map("threads", &tids[i], nothing);
		note_thread(pid, tids[i], "");
	}
	free(nothing);
	if (!choice->pid)
		return;
	if (lists(json_object_get(choice->plan, "levels"), "qnn"))
		warn("qnn: function tables that process %d already has are not searched: calls through them are not recorded", pid);
	note_mapped_files(pid);
	if (program_of(pid, program))
		attach_file(program, true);
	each_mapped(pid, attach_mapped, json_object_get(choice->plan, "patterns"));
}

static bool turn(void)
{
	const u8 **records;
	int count = drain_turn(answered, &records);

	for (int i = 0; i < count; i++)
		answer(records[i]);
	for (json_t *order; (order = next_order()); json_decref(order))
		carry_out_order(order);
	return count;
}

static void show(const struct target *target)
{
	const struct drained *d = drained();

	if (asks_about(true)) { /* it is here, and shows progress */
		tell_planner(json_pack("{s{si sI sI sI}}", "progress", "pid", target->pid, "steps", (json_int_t)d->records[KIND_TOKEN_END],
				       "records", (json_int_t)d->seen, "lost", (json_int_t)losses(NULL)));
		return;
	}

	say("%llu s, %llu steps, %llu records, %llu lost, %.1f MB", (unsigned long long)((now_ns() - target->began_ns) / NS_PER_S),
	    (unsigned long long)d->records[KIND_TOKEN_END], (unsigned long long)d->seen, (unsigned long long)losses(NULL), d->bytes * 1e-6);
}

static u64 earlier(u64 a, u64 b)
{
	return a < b ? a : b;
}

static bool is_enough(const struct choice *choice)
{
	return choice->tokens && drained()->records[KIND_TOKEN_END] >= choice->tokens;
}

static void record(const struct choice *choice, struct target *target)
{
	u64 began = now_ns(), next_line = began + NS_PER_S, next_manifest = began + FIRST_MANIFEST_NS, interrupted = 0;
	u64 deadline = choice->duration_s ? began + (u64)(choice->duration_s * NS_PER_S) : UINT64_MAX;

	while (now_ns() < deadline && !disk_failed() && !is_enough(choice)) {
		u64 now;

		if (asked_to_stop && !interrupted) { /* Ctrl-C reaches the command too: wait for it to end */
			interrupted = 1;
			deadline = earlier(deadline, now_ns() + (target->started_here ? NS_PER_S : 0));
		}
		now = choice->tokens ? now_ns() + WATCHFUL_NS : UINT64_MAX;
		sleep_until(earlier(earlier(deadline, now), earlier(next_line, next_manifest)));
		bool alive = poll_target(target);

		turn();
		stats_turn(false);
		if (!alive)
			return;
		now = now_ns();
		if (now >= next_manifest) {
			next_manifest = now + earlier(now - began, RAREST_MANIFEST_NS);
			name_living_threads();
			save_manifest("recording");
		}
		if (now >= next_line) {
			next_line += NS_PER_S;
			heat_turn(false);
			show(target);
		}
	}
}

static void take_last_words(void)
{
	json_t *answer = ask_planner(json_pack("{sb}", "end", true));

	carry_out_order(answer);
	json_decref(answer);
}

static void finish(struct target *target)
{
	heat_turn(true);
	set_settings(false);
	forget_threads();
	detach_all();
	while (turn() && !disk_failed())
		;
	turn();
	stats_turn(true);
	poll_target(target);
	name_living_threads();
	if (asks_about(true))
		take_last_words();
	save_manifest(disk_failed() ? "recording" : "complete");
}

/* Reports how the target ended; returns the exit code. */
static int conclude(struct target *target)
{
	u64 lost = losses(NULL);
	int status = 0;

	if (!target->over)
		say("detached; process %d keeps running, untraced", target->pid);
	show(target);
	if (lost)
		say("%llu records were lost: give a larger --ring-mib", (unsigned long long)lost);
	while (target->started_here && !target->over && !asked_to_stop) {
		poll_target(target);
		usleep(100000);
	}
	if (target->over && target->started_here)
		status = WIFSIGNALED(target->status) ? -WTERMSIG(target->status) : WEXITSTATUS(target->status);
	if (status)
		say("the command ended with %s %d", status < 0 ? "signal" : "status", abs(status));
	return disk_failed() ? 2 : lost || status;
}

static void wake_at_the_end(pid_t pid)
{
	int fd = syscall(SYS_pidfd_open, pid, 0);

	if (fd >= 0) /* before Linux 5.3 the end is noticed at the next turn */
		wake_on(fd, true);
}

int main(int argc, char **argv)
{
	struct choice choice = {0};
	struct target target = {0};

	read_options(argc, argv, &choice);
	signal(SIGINT, stop);
	signal(SIGTERM, stop);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN);
	make_folder(choice.folder);
	guard_begin();
	load_programs(&choice);
	measure_costs();
	open_rings(&choice);
	planner_wakes();
	attach_kernel(&choice);
	watch_begin(&choice);
	set_settings(true);
	stats_turn(false);
	if (choice.command)
		start_target(&target, choice.command);
	else
		follow_target(&target, choice.pid);
	heat_begin();
	heat_turn(false);
	manifest_begin(&choice, &target);
	if (choice.pid)
		each_descendant(choice.pid, adopt, &choice);
	else
		adopt(target.pid, &choice);
	set_settings(true);
	wake_at_the_end(target.pid);
	save_manifest("recording");
	release_target(&target);
	record(&choice, &target);
	finish(&target);
	guard_end();
	return conclude(&target);
}
