// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The cost of probe hits on this machine, measured before recording, and runs and times of programs, sampled in short windows. */
#include <bpf/bpf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "collect.h"

#define FIRST_WINDOW_NS 300000000ULL
#define WINDOW_NS 50000000ULL
#define FIRST_PAUSE_NS (2 * NS_PER_S)
#define LONGEST_PAUSE_NS (16 * NS_PER_S)
#define COLD_BYTES (2 << 20)
#define COLD_CALLS 60
#define REPEATS 5
#define MOST_CPUS 4096

uint64_t calibrate(int which, int calls, uint64_t bytes);
void calibrate_emulated(void);
void calibrate_stepped(void);
void calibrate_nop5(void);

static json_t *measured, *plan_programs;
static u64 window_ends, pause_ns = FIRST_PAUSE_NS;
static int window = -1;

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
		int fd = attach_uprobe("empty", "/proc/self/exe", own_offset(cases[i].function), cases[i].at_return, 0);

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

/* Opens or closes a window in which the kernel times programs, which costs more than some of the programs themselves. */
void stats_turn(bool last)
{
	u64 now = now_ns();

	if (!window_ends) {
		window = bpf_enable_stats(BPF_STATS_RUN_TIME);
		window_ends = now + FIRST_WINDOW_NS;
	} else if (window >= 0 && (last || now >= window_ends)) {
		close(window);
		window = -1;
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

struct told {
	u64 hits, inside, skipped;
};

static struct told told_of(const char *program)
{
	struct bpf_prog_info info = {0};
	u32 size = sizeof(info);
	struct told told = {runs_of(json_integer_value(json_object_get(plan_programs, program))), 0, 0};

	if (bpf_obj_get_info_by_fd(program_fd(program), &info, &size))
		return told;
	if (info.run_cnt)
		told.inside = (double)told.hits * info.run_time_ns / info.run_cnt;
	told.skipped = info.recursion_misses;
	return told;
}

static double cost_of(json_t *row, const char *heat)
{
	char name[64];
	const char *kind = !strcmp(text_of(row, "at"), "return") ? "return" : text_of(row, "cost");

	snprintf(name, sizeof(name), "%s%s", heat, kind);
	return json_real_value(json_object_get(measured, name));
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
		struct told told = told_of(program);
		double warm_ns = cost_of(row, ""), cold_ns = cost_of(row, "cold_");

		json_object_update_new(row, json_pack("{sf sf sf sI sI}", "ns_per_hit", warm_ns, "ns_per_hit_cold", cold_ns,
						      "bpf_ns_per_hit", told.hits ? (double)(told.inside / told.hits) : 0.0, "hits",
						      (json_int_t)told.hits, "skipped", (json_int_t)told.skipped));
		if (json_object_get(counted, program))
			continue;
		json_object_set_new(counted, program, json_true());
		*(strcmp(text_of(row, "engine"), "kernel") ? &inside : &kernel) += told.inside;
		trap += told.hits * warm_ns;
		cold += told.hits * cold_ns;
	}
	json_decref(counted);
	json_object_update_new(cost, json_pack("{sI sI sI sI}", "trap_ns", (json_int_t)trap, "trap_cold_ns", (json_int_t)cold, "bpf_ns",
					       (json_int_t)inside, "kernel_ns", (json_int_t)kernel));
}
