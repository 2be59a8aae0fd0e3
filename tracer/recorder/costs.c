// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The cost of probe hits on this machine, measured before recording, and runs and times of programs, sampled in short windows. */
#include <bpf/bpf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "recorder.h"

#define FIRST_WINDOW_NS 300000000ULL /* behind the first step: no program of an engine has run before */
#define WINDOW_NS 50000000ULL
#define FIRST_PAUSE_NS (NS_PER_S / 2)
#define LONGEST_PAUSE_NS (16 * NS_PER_S)
#define COLD_BYTES (2 << 20)
#define COLD_CALLS 60
#define REPEATS 5
#define MOST_CPUS 4096
#define LEAST_TIMED 20 /* hits of later windows that tell more of a program than its first ones */

uint64_t calibrate(int which, int calls, uint64_t bytes);
void calibrate_emulated(void);
void calibrate_stepped(void);
void calibrate_nop5(void);

static json_t *measured, *plan_programs;
static u64 window_ends, pause_ns = FIRST_PAUSE_NS;
static int window = -1;
static json_t *early; /* program → [hits, ns] that the first window timed */

static const struct {
	const char *name;
	int which;
	void (*function)(void);
	bool at_return;
	int calls;
} cases[] = {
	{"emulated", 0, calibrate_emulated, false, 1000},
	{"stepped", 1, calibrate_stepped, false, 100},
	{"nop5", 2, calibrate_nop5, false, 1000},
	{"return", 0, calibrate_emulated, true, 1000},
};

static double per_call(int which, int calls, u64 bytes)
{
	double least = 1e18;

	for (int i = 0; i < REPEATS; i++) {
		double each = (double)calibrate(which, calls, bytes) / calls;

		least = each < least ? each : least;
	}
	return least;
}

static double more(double with, double without)
{
	return with > without ? (s64)(with - without) : 0;
}

void measure_costs(void)
{
	char name[32];

	measured = json_object();
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		double warm = per_call(cases[i].which, cases[i].calls, 0), cold = per_call(cases[i].which, COLD_CALLS, COLD_BYTES);
		/* in this process alone: another recorder that measures at the same time runs the same file */
		int fd = attach_uprobe("empty", "/proc/self/exe", own_offset(cases[i].function), cases[i].at_return, 0, getpid());

		snprintf(name, sizeof(name), "cold_%s", cases[i].name);
		json_object_set_new(measured, cases[i].name, json_real(fd < 0 ? 0 : more(per_call(cases[i].which, cases[i].calls, 0), warm)));
		json_object_set_new(measured, name, json_real(fd < 0 ? 0 : more(per_call(cases[i].which, COLD_CALLS, COLD_BYTES), cold)));
		if (fd >= 0)
			close(fd);
	}
}

json_t *costs(void)
{
	return measured;
}

static struct bpf_prog_info info_of(const char *program)
{
	struct bpf_prog_info info = {0};
	u32 size = sizeof(info);

	bpf_obj_get_info_by_fd(program_fd(program), &info, &size);
	return info;
}

static void note_early(void)
{
	const char *program;

	early = json_object();
	for (int i = 0; (program = loaded_program(i)); i++) {
		struct bpf_prog_info info = info_of(program);

		json_object_set_new(early, program, json_pack("[II]", (json_int_t)info.run_cnt, (json_int_t)info.run_time_ns));
	}
}

/* Opens or closes a window in which the kernel times programs, which costs more than some of the programs themselves. */
void stats_turn(bool last)
{
	u64 now = now_ns();

	if (!window_ends) {
		window = bpf_enable_stats(BPF_STATS_RUN_TIME);
		window_ends = now + FIRST_WINDOW_NS;
	} else if (!early && !last && !drained()->steps) {
		window_ends = now + FIRST_WINDOW_NS;
	} else if (window >= 0 && (last || now >= window_ends)) {
		close(window);
		window = -1;
		if (!early)
			note_early();
		window_ends = now + pause_ns;
		pause_ns = 2 * pause_ns < LONGEST_PAUSE_NS ? 2 * pause_ns : LONGEST_PAUSE_NS;
	} else if (window < 0 && !last && now >= window_ends) {
		window = bpf_enable_stats(BPF_STATS_RUN_TIME);
		window_ends = now + WINDOW_NS;
	}
}

static u64 runs_of(s64 number)
{
	static u64 values[MOST_CPUS];
	u32 key = number;
	u64 sum = 0;

	memset(values, 0, sizeof(values));
	if (number < 0 || bpf_map_lookup_elem(map_fd("runs"), &key, values))
		return 0;
	for (int i = 0; i < MOST_CPUS; i++)
		sum += values[i];
	return sum;
}

struct counts {
	u64 hits, inside, skipped;
};

/*
 * Time in a program whose hits are timed in windows only. The first window is not like the rest: probes are learnt there, caches are
 * cold. Its hits count as they were timed, all others as those of later windows, if these timed enough of them.
 */
static u64 estimated_ns(const char *program, u64 hits, const struct bpf_prog_info *info)
{
	json_t *noted = json_object_get(early, program);
	u64 count = json_integer_value(json_array_get(noted, 0)), ns = json_integer_value(json_array_get(noted, 1));

	if (info->run_cnt < count + LEAST_TIMED || hits < count)
		count = ns = 0;
	return info->run_cnt > count ? ns + (double)(hits - count) * (info->run_time_ns - ns) / (info->run_cnt - count) : 0;
}

static struct counts counts_of(const char *program)
{
	struct bpf_prog_info info = info_of(program);
	u64 hits = runs_of(json_integer_value(json_object_get(plan_programs, program)));

	return (struct counts){hits, estimated_ns(program, hits, &info), info.recursion_misses};
}

static double cost_of(json_t *row, const char *heat)
{
	char name[64];
	const char *kind = !strcmp(text_of(row, "at"), "return") ? "return" : text_of(row, "cost");

	snprintf(name, sizeof(name), "%s%s", heat, kind);
	return json_real_value(json_object_get(measured, name));
}

struct spent spent_in(json_t *row)
{
	struct counts ran = counts_of(text_of(row, "program"));

	return (struct spent){ran.hits * cost_of(row, ""), ran.hits * cost_of(row, "cold_"), ran.inside, ran.hits};
}

/*
 * Fills in hits and ns per hit of every probe, and the sums. A program attached at several places counts once. Those on kernel
 * events run for every process of the machine.
 */
void account(json_t *plan_and_rows, json_t *cost)
{
	json_t *rows = json_object_get(plan_and_rows, "rows"), *row, *counted = json_object();
	u64 trap = 0, cold = 0, inside = 0, kernel = 0;
	size_t index;

	plan_programs = json_object_get(plan_and_rows, "programs");
	json_array_foreach(rows, index, row) {
		const char *program = text_of(row, "program");
		struct counts ran = counts_of(program);
		double warm_ns = cost_of(row, ""), cold_ns = cost_of(row, "cold_");

		json_object_update_new(row, json_pack("{sf sf sf sI sI}", "ns_per_hit", warm_ns, "ns_per_hit_cold", cold_ns,
						      "bpf_ns_per_hit", ran.hits ? (double)(ran.inside / ran.hits) : 0.0, "hits",
						      (json_int_t)ran.hits, "skipped", (json_int_t)ran.skipped));
		if (json_object_get(counted, program))
			continue;
		json_object_set_new(counted, program, json_true());
		*(strcmp(text_of(row, "engine"), "kernel") ? &inside : &kernel) += ran.inside;
		trap += ran.hits * warm_ns;
		cold += ran.hits * cold_ns;
	}
	json_decref(counted);
	json_object_update_new(cost, json_pack("{sI sI sI sI}", "trap_ns", (json_int_t)trap, "trap_cold_ns", (json_int_t)cold, "bpf_ns",
					       (json_int_t)inside, "kernel_ns", (json_int_t)kernel));
}
