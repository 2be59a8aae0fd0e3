// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * moescope-recorder: records by a plan, on a machine without Python. The plan is made on a host (`moescope plan`); the
 * recording is read on a host, like any other (docs/devices.md).
 */
#include <dirent.h>
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

#include "recorder.h"
#include "policy.h"

#define RING_MIB 8 /* a process that maps both has them counted twice: 32 MiB resident */
#define MOST_RING_MIB 2048 /* the kernel counts a map's bytes in 32 bits */
#define FIRST_MANIFEST_NS (5 * NS_PER_S)
#define WATCHFUL_NS (NS_PER_S / 100)
#define RAREST_MANIFEST_NS (60 * NS_PER_S)
#define FIRST_PROGRESS_NS (NS_PER_S / 20)
#define PARTING_NS (NS_PER_S / 2) /* how long an interrupted command may go on */
#define MOST_TASKS 4096
#define FIRST_PID_NAMESPACE 0xEFFFFFFCul /* the initial ones: PROC_PID_INIT_INO of include/linux/proc_ns.h */
#define FIRST_USER_NAMESPACE 0xEFFFFFFDul

static volatile sig_atomic_t asked_to_stop;

static const char usage[] =
	"usage: moescope-recorder --plan FILE -o FOLDER [options] -- COMMAND ARGUMENTS\n"
	"       moescope-recorder --plan FILE -o FOLDER [options] --pid PID\n"
	"       moescope-recorder --probe-features > FILE\n"
	"       moescope-recorder --identify < FILE\n"
	"       moescope-recorder --try-power < FILE\n"
	"\n"
	"Records according to a plan; `moescope plan` writes it on a host, which also reads the recording.\n"
	"  -p, --plan FILE       what to attach\n"
	"  --planner OUT,IN      descriptors on which questions are written and answers read (docs/devices.md):\n"
	"                        what the plan does not know is asked there, and the plan itself unless --plan gives it\n"
	"  -o, --output FOLDER   new folder of the recording\n"
	"  --pid PID             follow a running process, with its children\n"
	"  --duration SECONDS    how long to record (default: to the end)\n"
	"  --tokens N            stop recording after N steps\n"
	"  --only-slower-than S  keep only what happened in steps that take longer, in seconds\n"
	"  --min-tps TPS         switch costly levels off while decode is slower, in tokens/s\n"
	"  --max-overhead SHARE  largest slowdown of decode; costly levels are on only part of the time: 0.1 for 10 %\n"
	"  --ring-mib N          size of each of the two rings, a power of two (default: 8)\n"
	"  --buffer ring|perf    what carries records from the kernel; kernels before 5.8 need perf (default: ring)\n"
	"  --sched target|all    threads whose scheduling is recorded (default: target)\n"
	"  --pmc EVENTS          counters per thread: NAME=TYPE:CONFIG,..., with perf's numbers (CONFIG in hexadecimal)\n"
	"  --stacks HZ           samples of the threads' stacks a second\n"
	"  --long-wait SECONDS   with --stacks: keep the stack of each wait as long as this (default: 0.001)\n"
	"  --power HZ            readings of power sensors a second; 0: none (default: 10, fewer where they are costly)\n"
	"  --sysfs DIR           look for sensors of power and heat below this folder instead of /sys\n"
	"  --until-steady S      repeat the command until power, clocks and temperatures have settled, at most so many seconds\n"
	"  --steady-for S        how long they must not have moved (default: 60)\n"
	"  --meter               load the CPUs in a pattern first, for the file of an external power meter\n"
	"  --btf FILE            BTF types for a kernel without built-in BTF\n"
	"  --programs-fd N       socket to a process that compiles the programs (tracer/kernel/bcc_helper.py)\n"
	"  --probe-features      print this machine's features, for `moescope plan --features`\n"
	"  --try-programs        load all programs, and print what the kernel refused and what a probe's hit costs, in ns\n"
	"  --try-power           find and try the power sensors that standard input declares, as a plan does\n"
	"  --identify            print the build ids of programs and libraries, whose paths are read line by line\n"
	"  --version             print the version and the checksum of its programs' sources\n"
	"Exit code: the command's, 128 + N if signal N ended it; 125 if nothing or only a part was recorded.\n"
	"With --pid: 1 if records were lost.\n";

static void stop(int number)
{
	asked_to_stop = number;
	hurry_planner();
}

static const char *const parts[] = {"events.bin", "events.sum", "details.bin", "details.sum", "stacks.bin", "stacks.sum", "manifest.json", ""};
static char written[sizeof(parts) / sizeof(*parts)][PATH_MOST]; /* what of the recording to remove, at last its folder */
static volatile sig_atomic_t unbegun;

/* Removes the recording of a command that never ran; called at exit, and by a signal's handler. */
static void discard(void)
{
	act_as_caller(true);
	for (size_t i = 0; unbegun && i < sizeof(parts) / sizeof(*parts); i++)
		if (*parts[i] ? unlink(written[i]) : rmdir(written[i]))
			continue;
	act_as_caller(false);
}

static void stop_early(int number)
{
	discard();
	_exit(128 + number);
}

static void make_folder(const char *folder)
{
	struct dirent *entry;
	DIR *there;

	act_as_caller(true);
	if (mkdir(folder, 0755) && errno != EEXIST)
		fail("cannot make %s: %s", folder, strerror(errno));
	there = opendir(folder);
	if (!there)
		fail("cannot read %s: %s", folder, strerror(errno));
	while ((entry = readdir(there))) {
		if (!strcmp(entry->d_name, "manifest.json"))
			fail("%s already holds a recording: give another folder with -o", folder);
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
			fail("%s is not empty (it holds %s): give a new or an empty folder with -o", folder, entry->d_name);
	}
	closedir(there);
	act_as_caller(false);
	for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++)
		snprintf(written[i], PATH_MOST, "%s/%s", folder, parts[i]);
	unbegun = true;
	atexit(discard);
}

/* So is a kernel's without namespaces. */
static bool is_first_namespace(const char *path, ino_t first)
{
	struct stat status;

	return stat(path, &status) || status.st_ino == first;
}

static void need_rights(void)
{
	if (!is_first_namespace("/proc/self/ns/user", FIRST_USER_NAMESPACE))
		fail("in a user namespace of its own (a rootless container), whose root may not use BPF: run it outside");
	if (!may_trace())
		fail("not root: the kernel lets root probe, or a program with CAP_BPF and CAP_PERFMON (on Android: a root shell; elsewhere: sudo)");
	if (!may_open_events())
		fail("the kernel keeps events from who has no CAP_SYS_ADMIN: type sysctl kernel.perf_event_paranoid=2");
	keep_few_rights();
}

static void print_features(void)
{
	char *text;

	need_rights();
	text = json_dumps(features(), 0);
	puts(text);
	free(text);
	exit(0);
}

/* Loads every program and measures what a hit costs, for `doctor` and `probes`. */
static void try_programs(struct choice *choice)
{
	json_t *all = all_programs(choice->perf);
	char *text;

	need_rights();
	check_descriptors(LEAST_DESCRIPTORS);
	choice->plan = json_pack("{sO s{}}", "programs", all, "engines");
	choice->ring_bytes = RING_MIB << 20;
	load_programs(choice);
	measure_costs();
	text = json_dumps(json_pack("{si sO sO}", "programs", (int)json_object_size(all), "refused", refused_programs(), "costs", costs()),
			  JSON_REAL_PRECISION(9));
	puts(text);
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

static void print_power_sources(const struct choice *choice)
{
	json_error_t error;
	json_t *declared = json_loadf(stdin, 0, &error);
	char *text;

	if (!declared)
		fail("the declared power sensors are damaged: line %d: %s", error.line, error.text);
	text = json_dumps(try_power(declared, choice->sysfs), JSON_REAL_PRECISION(9));
	puts(text);
	free(text);
	exit(0);
}

static double positive(const char *option, const char *text)
{
	char *end;
	double value = strtod(text, &end);

	if (*end || !(value > 0 && value < 1e9))
		fail("%s %s is not a positive number", option, text);
	return value;
}

static void check(struct choice *choice, const char *plan)
{
	u64 mib = choice->ring_bytes >> 20;

	if ((!plan && choice->questions < 0) || !choice->folder || (!choice->pid == !choice->command)) {
		fputs(usage, stderr);
		exit(FAILED);
	}
	if (!mib || mib & (mib - 1) || mib > MOST_RING_MIB)
		fail("--ring-mib %llu is not a power of two up to %d", (unsigned long long)mib, MOST_RING_MIB);
	if (choice->min_tps && choice->max_overhead)
		fail("--min-tps and --max-overhead cannot be combined, as both switch levels");
	need_rights();
	if (!is_first_namespace("/proc/self/ns/pid", FIRST_PID_NAMESPACE))
		fail("in a PID namespace of its own (a container), where programs have other numbers than in the kernel: give it the host's");
	check_descriptors(LEAST_DESCRIPTORS);
	choice->plan = plan ? read_plan(plan) : NULL;
	if (choice->questions >= 0)
		begin_planning(choice->questions, choice->answers, &choice->plan);
	check_plan(choice->plan, plan ? plan : "the planner's plan");
	choose_events(choice->events);
}

/* Whether the second of two words was given. */
static bool is_second(const char *option, const char *given, const char *first, const char *second)
{
	if (strcmp(given, first) && strcmp(given, second))
		fail("%s %s is neither %s nor %s", option, given, first, second);
	return !strcmp(given, second);
}

static void read_options(int argc, char **argv, struct choice *choice)
{
	static const struct option options[] = {{"plan", 1, 0, 'p'},	 {"output", 1, 0, 'o'},		{"pid", 1, 0, 'P'},
						{"duration", 1, 0, 'd'}, {"ring-mib", 1, 0, 'r'},	{"btf", 1, 0, 'b'},
						{"help", 0, 0, 'h'},	 {"probe-features", 0, 0, 'f'}, {"version", 0, 0, 'v'},
						{"identify", 0, 0, 'i'}, {"tokens", 1, 0, 't'},		{"planner", 1, 0, 'a'},
						{"buffer", 1, 0, 'B'},	 {"sched", 1, 0, 's'},		{"pmc", 1, 0, 'c'},
						{"programs-fd", 1, 0, 'F'},
						{"only-slower-than", 1, 0, 'S'}, {"min-tps", 1, 0, 'T'}, {"max-overhead", 1, 0, 'O'},
						{"stacks", 1, 0, 'K'}, {"long-wait", 1, 0, 'W'},
						{"power", 1, 0, 'H'}, {"sysfs", 1, 0, 'Y'}, {"try-power", 0, 0, 'E'},
						{"meter", 0, 0, 'M'}, {"until-steady", 1, 0, 'U'}, {"steady-for", 1, 0, 'G'},
						{"try-programs", 0, 0, 'y'}, {0, 0, 0, 0}};
	const char *plan = NULL;
	bool tries = false, tries_power = false;
	int each;

	choice->ring_bytes = RING_MIB << 20;
	choice->questions = choice->answers = choice->programs_fd = -1;
	choice->waiting = heed_planner;
	choice->long_wait_s = 0.001;
	choice->steady_for_s = 60;
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
		case 'S': choice->only_slower_s = positive("--only-slower-than", optarg); break;
		case 'T': choice->min_tps = positive("--min-tps", optarg); break;
		case 'O': choice->max_overhead = positive("--max-overhead", optarg); break;
		case 'K': choice->stacks_hz = positive("--stacks", optarg); break;
		case 'W': choice->long_wait_s = positive("--long-wait", optarg); break;
		case 'H': choice->power_hz = strcmp(optarg, "0") ? positive("--power", optarg) : -1; break;
		case 'Y': choice->sysfs = optarg; break;
		case 'M': choice->meter = true; break;
		case 'U': choice->until_steady_s = positive("--until-steady", optarg); break;
		case 'G': choice->steady_for_s = positive("--steady-for", optarg); break;
		case 'E': tries_power = true; break;
		case 'r': choice->ring_bytes = strtoull(optarg, NULL, 10) << 20; break;
		case 'b': choice->btf = optarg; break;
		case 'B': choice->perf = is_second("--buffer", optarg, "ring", "perf"); break;
		case 's': choice->everyone = is_second("--sched", optarg, "target", "all"); break;
		case 'c': choice->events = optarg; break;
		case 'F': choice->programs_fd = atoi(optarg); break;
		case 'f': print_features(); break;
		case 'y': tries = true; break;
		case 'i': print_identities(); break;
		case 'v': printf("%s (programs %s)\n", VERSION, SOURCES); exit(0);
		case 'h': fputs(usage, stdout); exit(0);
		default: fputs(usage, stderr); exit(FAILED);
		}
	}
	choice->command = optind < argc ? argv + optind : NULL;
	if (tries)
		try_programs(choice);
	if (tries_power)
		print_power_sources(choice);
	check(choice, plan);
}

static void attach_mapped(const struct mapping *mapping, void *context)
{
	json_t *prefixes = context, *prefix;
	const char *path = mapping->path, *name = strrchr(path, '/');
	size_t index;

	if (!mapping->is_code || path[0] != '/')
		return;
	name++;
	json_array_foreach(prefixes, index, prefix) {
		if (!strncmp(name, json_string_value(prefix), json_string_length(prefix)))
			probe_file(path, false);
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

	if (choice->pid)
		act_for_user_of(pid);
	guard(pid, true);
	for (int i = 0; i < count; i++) {
		set_map("threads", &tids[i], nothing);
		count_thread(tids[i]);
		note_thread(pid, tids[i], "");
	}
	free(nothing);
	if (!choice->pid)
		return;
	keep_mappings(pid);
	note_mapped_files(pid);
	if (program_of(pid, program))
		probe_file(program, true);
	else if (errno == EACCES)
		warn("process %d is another user's: without CAP_SYS_PTRACE its program, and on older kernels its libraries, are not probed", pid);
	each_mapping(pid, attach_mapped, json_object_get(choice->plan, "patterns"));
	probe_earlier_tables(pid);
}

static void carry_out_orders(void)
{
	for (json_t *order; (order = next_order()); json_decref(order))
		carry_out_order(order);
}

static bool turn(bool last)
{
	const u8 **records;
	int count;

	stacks_mark();
	heat_turn();
	power_turn();
	count = drain_turn(answered, &records, last);

	for (int i = 0; i < count; i++)
		answer(records[i]);
	carry_out_orders();
	stacks_turn();
	return count;
}

static void tell_progress(const struct target *target)
{
	const struct drained *d = drained();
	json_t *progress = json_pack("{si sI sI sI sI}", "pid", target->pid, "steps", (json_int_t)d->steps, "decode_steps",
				     (json_int_t)d->decode_steps, "records", (json_int_t)d->seen, "lost", (json_int_t)losses(NULL));

	add_to_progress(progress);
	tell_planner(json_pack("{so}", "progress", progress));
}

static void show(const struct target *target)
{
	const struct drained *d = drained();

	say("%llu s, %llu steps, %llu records, %llu lost, %.1f MB", (unsigned long long)((now_ns() - target->began_ns) / NS_PER_S),
	    (unsigned long long)d->steps, (unsigned long long)d->seen, (unsigned long long)losses(NULL), d->bytes * 1e-6);
}

static u64 earlier(u64 a, u64 b)
{
	return a < b ? a : b;
}

/* Each pause is as long as all before it together: soon at first, when the planner may move probes that nothing hits. */
static u64 progress_pause_ns(u64 elapsed)
{
	return earlier(elapsed, NS_PER_S);
}

static bool is_enough(const struct choice *choice)
{
	return (choice->tokens && drained()->steps >= choice->tokens) || is_steady();
}

/* The end of --duration or of --until-steady, from `began` on. */
static u64 deadline_ns(const struct choice *choice, u64 began)
{
	double most = choice->duration_s;

	if (choice->until_steady_s && (!most || choice->until_steady_s < most))
		most = choice->until_steady_s;
	return most ? began + (u64)(most * NS_PER_S) : UINT64_MAX;
}

static void record(const struct choice *choice, struct target *target)
{
	u64 began = now_ns(), next_line = began + NS_PER_S, next_manifest = began + FIRST_MANIFEST_NS, interrupted = 0;
	u64 next_progress = asks_about(true) ? began + FIRST_PROGRESS_NS : UINT64_MAX;
	u64 deadline = deadline_ns(choice, began);

	while (now_ns() < deadline && !disk_failed() && !is_enough(choice)) {
		u64 now;

		if (asked_to_stop && !interrupted) { /* Ctrl-C reaches the command too: wait for it to end */
			interrupted = 1;
			if (asked_to_stop == SIGTERM && target->started_here)
				kill(target->pid, SIGTERM);
			deadline = earlier(deadline, now_ns() + (target->started_here ? PARTING_NS : 0));
		}
		now = choice->tokens ? now_ns() + WATCHFUL_NS : policy_due_ns();
		sleep_until(earlier(earlier(deadline, now), earlier(next_progress, earlier(next_line, next_manifest))));
		bool alive = poll_target(target);

		turn(false);
		stats_turn(false);
		policy_turn();
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
			steady_turn(drained()->steps);
			if (!asks_about(true))
				show(target);
		}
		if (now >= next_progress) {
			next_progress = now + progress_pause_ns(now - began);
			tell_progress(target);
		}
	}
}

static void take_last_words(void)
{
	json_t *answer = ask_planner(json_pack("{sb}", "end", true), -1);

	carry_out_order(answer);
	json_decref(answer);
}

static void finish(struct target *target)
{
	if (target->over) /* first: it may end while the rest is done */
		tell_survivors(target->pid);
	repeat_no_more();
	end_samplers();
	policy_end();
	set_settings(false);
	forget_threads();
	detach_all();
	uncount_all();
	while (turn(false) && !disk_failed())
		;
	turn(true);
	stacks_end();
	stats_turn(true);
	poll_target(target);
	unbegun = target->never_ran;
	if (target->never_ran) /* poll_target said why */
		exit(FAILED);
	name_living_threads();
	tables_end();
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
	if (!asks_about(true))
		show(target);
	if (lost)
		say("%llu records were lost: give a larger --ring-mib", (unsigned long long)lost);
	while (target->started_here && !target->over && !asked_to_stop) {
		poll_target(target);
		heed_planner();
		usleep(100000);
	}
	if (!target->over && target->started_here && asked_to_stop == SIGTERM)
		kill(target->pid, SIGTERM);
	if (target->over && target->started_here)
		status = WIFSIGNALED(target->status) ? -WTERMSIG(target->status) : WEXITSTATUS(target->status);
	if (status)
		say("the command ended with %s %d", status < 0 ? "signal" : "status", abs(status));
	if (disk_failed())
		return FAILED;
	return !target->started_here ? lost > 0 : status < 0 ? 128 - status : status;
}

static void choose_buffer(struct choice *choice)
{
	if (choice->perf || has_ring_buffers())
		return;
	warn("this kernel has no BPF ring buffers (Linux 5.8): perf buffers are used");
	choice->perf = true;
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
	signal(SIGINT, stop_early);
	signal(SIGTERM, stop_early);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN);
	make_folder(choice.folder);
	guard_begin();
	choose_buffer(&choice);
	leave_silent_programs(choice.plan, choice.sysfs);
	load_programs(&choice);
	heed_planner();
	measure_costs();
	heed_planner();
	open_rings(&choice);
	planner_wakes();
	policy_begin(&choice);
	attach_kernel(&choice);
	stacks_begin(&choice);
	heed_planner();
	watch_begin(&choice);
	tables_begin(&choice);
	orders_begin(&choice);
	set_settings(true);
	stats_turn(false);
	if (choice.command)
		start_target(&target, choice.command, choice.until_steady_s);
	else
		follow_target(&target, choice.pid);
	allow_many_files();
	heat_begin(choice.sysfs);
	power_begin(&choice);
	steady_begin(&choice);
	manifest_begin(&choice, &target);
	if (choice.pid)
		each_descendant(choice.pid, adopt, &choice);
	else
		adopt(target.pid, &choice);
	set_settings(true);
	wake_at_the_end(target.pid);
	save_manifest("recording");
	signal(SIGINT, stop);
	signal(SIGTERM, stop);
	unbegun = false;
	if (choice.meter)
		play_pattern();
	if (choice.command)
		power_floor();
	carry_out_orders(); /* what the planner knows of the program already */
	release_target(&target);
	record(&choice, &target);
	finish(&target);
	tell_planner(json_pack("{sb}", "written", true));
	guard_end();
	return conclude(&target);
}
