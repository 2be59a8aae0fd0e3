/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The recorder's parts, from the ground up: messages, files, the kernel, rings, the target, answers to it, the manifest. */
#ifndef MOESCOPE_COLLECT_H
#define MOESCOPE_COLLECT_H

#include <jansson.h>
#include <pthread.h>
#include <sys/types.h>

#include "types.h"

#include "structs.h"

#define PATH_MOST 4096
#define DIGEST_BYTES 17
#define FAILED 125 /* the exit code of this program's own failures, as those of env, timeout and docker */
#define LEAST_DESCRIPTORS 512
#define MOST_GROUPS 64

/* The settings from the command line and the plan; constant while recording. */
struct choice {
	json_t *plan;
	const char *folder;
	const char *btf;
	int questions, answers; /* descriptors of the planner's pipe; -1: a plan file stands in */
	int programs_fd; /* socket to a process that compiles the programs; -1: those inside this one are loaded */
	void (*waiting)(void); /* to be called now and then meanwhile */
	char **command; /* NULL if a process is followed */
	pid_t pid;
	double duration_s;
	u64 tokens; /* 0: no limit */
	u64 ring_bytes;
	bool perf; /* perf buffers instead of rings */
	char *events; /* to count per thread, "name=type:config,..."; or NULL */
	bool everyone; /* the scheduler of all threads */
	u32 stacks_hz; /* samples of stacks a second; 0: none */
	double long_wait_s; /* stacks are kept of waits as long as this */
	double only_slower_s, min_tps, max_overhead; /* 0: without */
	double power_hz; /* readings of power sensors a second; 0: usual, less than 0: none */
	bool meter; /* an external power meter runs */
	const char *sysfs; /* where to look for sensors instead of /sys; or NULL */
	double until_steady_s, steady_for_s; /* how long it may take; 0: not asked. How long nothing may move */
};

/* messages.c: one line on standard error each; warnings go into the manifest, too */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn)); /* exit code FAILED */
void check_descriptors(u64 least); /* fails if fewer files may be open */
json_t *warnings(void);
json_t *plain_text(const char *text); /* bytes that are not UTF-8 become ? */
u64 now_ns(void);
double cpu_s(void);

/* plan.c */
json_t *read_plan(const char *path);
void check_plan(json_t *plan, const char *source); /* which is named where the plan is refused */
const char *text_of(json_t *object, const char *key);
s64 number_of(json_t *object, const char *key);
bool lists(json_t *array, const char *text);
json_t *planned_file(json_t *plan, const char *id);

/* planner.c: who decides what is probed, where a plan file does not; answers and orders have one form (docs/devices.md) */
void begin_planning(int questions, int answers, json_t **plan); /* NULL: it is asked for */
bool has_planner(void);
bool asks_about(bool is_executable); /* a plan file names the programs already, and a command may execute many others */
void planner_wakes(void); /* an order ends `sleep_until` */
void tell_planner(json_t *message);
json_t *ask_planner(json_t *question, int fd); /* handing over a descriptor, or -1; NULL if it is gone or silent */
void hurry_planner(void); /* an answer is awaited for less long from now on; callable from a signal's handler */
void heed_planner(void); /* lets it stop us while we do not ask */
json_t *next_order(void); /* NULL if there is none */
/* files.c: files that the user names or the target can change, opened with that user's rights: regular ones of at most so many bytes */
int open_as_user(const char *path, s64 most); /* -1 and errno */
void act_for_user_of(pid_t pid);

/* digest.c */
void digest(const void *data, size_t bytes, char *text);
bool digest_file(int fd, s64 most, char *text); /* false if it is longer */

/* elf.c: the identity of a file */
bool identify(const char *path, char *id, size_t bytes); /* build id or XXH3; false if it is not a 64-bit ELF file */
s64 own_offset(const void *function); /* in the executable of this process */

/* kernel_features.c */
void check_tracefs(void); /* fails if there are no tracepoints to attach to */
bool has_tracepoint(const char *category, const char *name);
const char *tracefs(void);
bool has_ring_buffers(void);
json_t *features(void);

/* programs.c */
void load_programs(const struct choice *choice);
bool is_loaded(const char *program);
json_t *refused_programs(void); /* name → reason */
json_t *all_programs(bool perf); /* name → -1 */
s64 setting_offset(const char *name); /* within struct settings; -1 if the programs have no such setting */
void load_more(json_t *programs); /* loads further programs (name → the number under which each counts its runs) */
int program_fd(const char *name); /* -1 if it is not loaded */
const char *loaded_program(int index); /* NULL behind the last */
bool is_raw(const char *program);
int copy_with_cookie(const char *name, u32 cookie); /* patched in, for kernels without cookies; -1 and errno */
int map_fd(const char *name);
void set_map(const char *name, const void *key, const void *value);
void delete_from_map(const char *name, const void *key);

/* probes.c */
bool may_open_events(void); /* on all CPUs */
int attach_tracepoint(const char *program, const char *category, const char *name); /* -1 and errno */
int attach_software(const char *program, u32 config, int cpu);
int attach_uprobe(const char *program, const char *path, u64 offset, bool at_return, u64 cookie, pid_t only); /* 0: in every process */
struct perf_event_attr;
int connect_event(struct perf_event_attr *attributes, int cpu, const char *program); /* of any thread; -1 and errno */
int open_event(struct perf_event_attr *attributes, pid_t tid, int cpu); /* -1: all; returns -1 and errno */

/* drain.c: `picked` are the slots of kinds that are answered, oldest first; valid until the next turn */
struct drained {
	u64 records[256]; /* written */
	u64 seen, steps, decode_steps, bytes; /* decode steps: those begun */
};
void open_rings(const struct choice *choice);
int drain_turn(const bool *wanted, const u8 ***picked, bool last);
void wake_on(int fd, bool once);
void sleep_until(u64 deadline_ns);
void seal(void);
bool disk_failed(void);
const struct drained *drained(void);
json_t *lost_by_cpu(void);
const struct steps *finished_steps(void); /* by the last turn; only with a policy that is about steps */
struct misses *seen_misses(void);
const struct sieve *sieve(void); /* NULL if all records are written */
void add_event(const struct header *record);

void keep_stacks(const u8 *record, size_t bytes);

/* stacks.c: samples of stacks */
#define STACKS_LEVEL "stacks" /* as a level that --max-overhead switches */
void stacks_pause(bool paused);
void stacks_begin(const struct choice *choice);
void keep_mappings(pid_t pid); /* of a process that ran before */
void stacks_mark(void);
void stacks_turn(void);
void stacks_end(void);
json_t *stacks(bool whole);

/* counters.c: performance counters */
void choose_events(char *text);
u32 event_count(void);
void allow_many_files(void);
void count_thread(pid_t tid);
void uncount_thread(pid_t tid);
void uncount_all(void);
json_t *counters(void);

/* rights.c: capabilities of this process, which is root's or has some by its file */
bool may_trace(void);
void keep_few_rights(void);
void read_as_user(bool as_user); /* without those that open others' files, or with them again; not for root, whose go with its number */
void leave_rights(void); /* before the command is executed */

/* target.c */
struct target {
	pid_t pid;
	const char *command; /* the program's name, if it was started here */
	bool started_here, over, never_ran;
	int status; /* as from waitpid */
	u64 cpu_ns, began_ns; /* CPU time while it was followed */
};
uid_t caller(void);
void be_urgent(pid_t pid, bool urgent); /* before all ordinary threads, so that the stopped target does not wait for them too */
void act_as_caller(bool as_caller); /* opens and creates files with the rights of who called sudo, from now on */
void guard_begin(void);
void guard(pid_t pid, bool watch);
void guard_end(void);
void start_target(struct target *target, char **command, bool repeats); /* whose command begins again when it has ended */
void repeat_no_more(void);
u32 commands_begun(void);
void follow_target(struct target *target, pid_t pid);
void release_target(struct target *target);
bool poll_target(struct target *target);
int tasks_of(pid_t pid, pid_t *tids, int most);
void each_descendant(pid_t pid, void (*act)(pid_t pid, void *context), void *context); /* itself first */
int name_of(pid_t pid, pid_t tid, char *name, size_t bytes);

/* reach.c: files are named as the user knows them; some, as those deleted while mapped, are opened by another path */
const char *opening_path(const char *shown); /* the path that opens a file */
struct mapping {
	u64 start, end, offset, inode;
	bool is_code, is_writable;
	u32 major, minor;
	char path[PATH_MOST]; /* of a file: one that opens it here; else as in /proc/PID/maps */
};
/* The file that contains an address of a process, by a path that opens here; false if there is none. */
bool place_of(pid_t pid, u64 address, char *path, u64 *offset);
bool program_of(pid_t pid, char *path);
bool opened_by(pid_t pid, const char *name, char *path);
void each_mapping(pid_t pid, void (*act)(const struct mapping *mapping, void *context), void *context);

/* qnn_tables.c: function tables in the memory of a running program */
#define QNN_SLOTS (TABLE_PARTS * TABLE_SLOTS)
struct provider {
	u32 backend, api[3];
	u64 slots[QNN_SLOTS]; /* addresses */
};
struct qairt_table {
	u64 words[TABLE_SLOTS]; /* its size in bytes, getInterface, functions */
};
int find_providers(pid_t pid, json_t *libraries, u32 major, struct provider *found, int most, u64 *bytes);
int find_qairt_tables(pid_t pid, json_t *libraries, struct qairt_table *found, int most, u64 *bytes);

/* attach.c: carries out the plan */
struct row {
	json_t *row; /* of the plan, with its file */
	int fd;	     /* -1 while its level is shed */
	int cpu;     /* of a software event; only the first one is told */
	bool leaves; /* is to be removed */
	bool failed; /* it could not be attached again */
	u64 retired_ns;
	dev_t dev; /* of its file when it was attached */
	ino_t ino;
};
void attach_kernel(const struct choice *choice);
enum known {
	SEEN,	    /* examined before, or by the plan now */
	UNREADABLE, /* no program or library */
	UNKNOWN,    /* to the plan */
};
enum known attach_known(const char *path, const char **id);
void attach_planned(json_t *planned, const char *path);
void attach_new_row(json_t *row, const char *path); /* takes the row */
void retire(json_t *all); /* removes probes for good: all of a program's, or those in one library */
void take_settings(json_t *wanted);
int placed(void); /* probes, in all */
void attach_row(json_t *row, const char *path, u64 offset, const char *symbol, const char *why);
bool stands_in(const char *program, const char *path);
void attach_spared(void);
void spare(json_t *row, const char *path, u64 offset, const char *symbol);
void set_settings(bool stop);
void detach_all(void);
/* Remove the probes of levels, in a separate process, whose id is returned: they are gone when it has ended (-1: now). */
pid_t remove_levels(const char *const *levels, int count);
void restore_levels(const char *const *levels, int count);
bool restore_some(u64 until_ns); /* attaches probes of restored levels; true when none is left */
bool is_shed(const char *level);
json_t *attached(void); /* rows for the manifest */
json_t *attached_row(int index); /* NULL after the last */
bool is_learning(u64 *since_ns, u64 *until_ns); /* whether learning probes were ever placed; until: now, if they are still */
bool awaits_learning(void); /* learning probes are placed that a planner will replace; without one, they stay */
json_t *libraries_of(const char *engine);
const char *id_of(const char *path);

/* orders.c */
void orders_begin(const struct choice *choice);
bool probe_file(const char *path, bool is_executable); /* true if it got probes */
void carry_out_order(json_t *order); /* of a planner, or its answer; every part may be absent */
u64 planner_cpu_ns(void); /* that a planner on this machine has used for the recording, as far as it has said */
json_t *merged_entries(void); /* of the manifest, in the place of our own */

/* tables.c: whether the target waits for us */
void tables_begin(const struct choice *choice);
bool on_qnn_table(const struct rec_qnn_table *r);
bool on_api_table(const struct rec_api_table *r);
void on_qnn_callback(const struct rec_qnn_callback *r);
void on_qnn_reader(const struct rec_qnn_reader *r);
void probe_earlier_tables(pid_t pid);
void tables_end(void); /* warns of tables that were seen and not understood */
json_t *qnn(void);

/* disturbances.c */
json_t *disturbance(u64 begin, u64 end, const char *reason);
void disturbed_since(u64 begin_ns); /* probes were placed, or the target was stopped for it, until now */
json_t *placing_times(void);

/* watch.c: answers to the target */
extern bool answered[256];
void watch_begin(const struct choice *choice);
void answer(const u8 *slot);
void note_thread(pid_t pid, pid_t tid, const char *name);
bool has_process(pid_t pid); /* whether it is of the target */
void name_living_threads(void);
void forget_threads(void);
void tell_survivors(pid_t target); /* warns of processes that it started and that outlive it */
json_t *threads(void);
json_t *sites(void);
json_t *io_files(void);
json_t *held(void);
json_t *disturbances(void);
void keep_code_maps(const char *folder, time_t since); /* since: files from before do not count */
json_t *keep_qnn_logs(const char *folder, bool whole);
void note_mapped_files(pid_t pid);

/* costs.c: cost of probe hits and of the programs */
void measure_costs(void);
json_t *costs(void);
void stats_turn(bool last);
void account(json_t *rows, json_t *cost);
/* What a program cost so far by one of its rows, ns: traps with warm and with cold caches, and inside. */
struct spent {
	double trap, trap_cold, inside;
	u64 hits;
};
struct spent spent_in(json_t *row);

/* sampler.c: threads that read slow files at their own rates */
struct sampler {
	const char *name;
	void (*read)(struct sampler *s);
	u64 period_ns;
	u32 least_pause; /* between readings, as a multiple of the CPU time of one */
	u64 cpu_ns; /* so far */
	pthread_t thread;
};
void start_sampler(struct sampler *s);
void end_samplers(void); /* all, each after a last reading */
int open_sensor(const char *path, bool of_user); /* a file below /sys, or below a folder that the user named; -1 and errno */
void open_sensor_again(const char *path, bool of_user, int *fd);
ssize_t sensor_text(int fd, char *text, size_t bytes); /* "" if it cannot be read */
bool sensor_number(int fd, s64 *number);
bool number_from(const char *text, s64 *number);

/* heat.c: clocks and temperatures from sysfs */
void leave_silent_programs(json_t *plan, bool elsewhere); /* those on clocks and heat of which this machine has none, or of another sysfs */
void heat_begin(const char *below); /* another folder than /sys; or NULL */
void heat_turn(void);
void each_heat(void (*act)(u16 what, u16 number, s32 value)); /* the newest values */
json_t *heat_found(void);
void governors(char *text, size_t bytes);

/* power.c: power sensors, which threads of their own read */
void power_begin(const struct choice *choice);
void play_pattern(void);
void power_floor(void); /* waits while the machine is idle */
void power_turn(void);
double joules_read(void); /* of all rails so far */
json_t *power_found(void);
json_t *try_power(json_t *declared, const char *below);

/* steady.c: whether clocks, temperatures and power have settled */
void steady_begin(const struct choice *choice);
void steady_turn(u64 steps); /* once a second */
bool is_steady(void);
json_t *steady_found(u32 commands);

/* manifest.c */
void manifest_begin(const struct choice *choice, const struct target *target);
u64 losses(json_t *by_kind);
void save_manifest(const char *state);

#endif
