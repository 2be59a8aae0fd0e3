// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Waits at points whose stacks the program knows itself, and work whose CPU time it measures: stack_points ROUNDS LIBRARY. Prints JSON.
 * `points`: each wait's thread, begin and end (CLOCK_MONOTONIC, ns), and the return addresses that backtrace() gave right before, as
 * [file, address in it]. `spent`: CPU time by function, ns. LIBRARY, if not empty, is loaded with dlopen.
 */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <csignal>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <unistd.h>

#if defined(__clang__)
#define APART __attribute__((noinline))
#else
#define APART __attribute__((noipa))
#endif

static volatile unsigned long sink;
static std::string said_points, said_spent;
static const char *program;

static unsigned long now(clockid_t clock)
{
	timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

struct Place {
	unsigned long address;
	const char *file;
	unsigned long within;
};

static int find_place(dl_phdr_info *info, size_t, void *data)
{
	Place *place = static_cast<Place *>(data);

	for (int i = 0; i < info->dlpi_phnum; i++) {
		unsigned long begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;

		if (info->dlpi_phdr[i].p_type == PT_LOAD && place->address - begin < info->dlpi_phdr[i].p_memsz) {
			place->file = *info->dlpi_name ? info->dlpi_name : program;
			place->within = place->address - info->dlpi_addr;
		}
	}
	return 0;
}

static void say_point(const char *name, unsigned long begin, unsigned long end, void **frames, int count)
{
	char text[400];

	snprintf(text, sizeof(text), "%s{\"name\": \"%s\", \"tid\": %d, \"begin\": %lu, \"end\": %lu, \"frames\": [",
		 said_points.empty() ? "" : ",\n", name, gettid(), begin, end);
	said_points += text;
	for (int i = 0; i < count; i++) {
		Place place = {reinterpret_cast<unsigned long>(frames[i]), "", 0};

		dl_iterate_phdr(find_place, &place);
		snprintf(text, sizeof(text), "%s[\"%s\", %lu]", i ? ", " : "", place.file, place.within);
		said_points += text;
	}
	said_points += "]}";
}

/* Notes its callers and waits; extern "C" for the library, which calls it. */
extern "C" APART void point(const char *name)
{
	static void *frames[200];
	int count = backtrace(frames, 200);
	unsigned long begin = now(CLOCK_MONOTONIC);

	usleep(4000);
	say_point(name, begin, now(CLOCK_MONOTONIC), frames, count);
}

APART static void plain(int levels)
{
	if (levels)
		plain(levels - 1);
	else
		point("recursion");
	sink = sink + 1;
}

APART static void reached_by_a_jump(const char *name)
{
	sink = sink + 1;
	point(name);
	sink = sink + 1;
}

APART static void tail_call(const char *name)
{
	sink = sink + 1;
	return reached_by_a_jump(name);
}

APART static void variable_frame(size_t bytes)
{
	char *room = static_cast<char *>(__builtin_alloca(bytes));

	memset(room, 1, bytes);
	point("variable frame");
	sink = sink + room[bytes / 2];
}

APART static void aligned_frame(int a, int b, int c, int d, int e, int f, int g, int h)
{
	alignas(64) volatile char room[256];

	room[a & 255] = b + c + d + e + f;
	point("aligned frame");
	sink = sink + room[g & 255] + h;
}

APART static int compare(const void *, const void *)
{
	static bool waited;

	if (!waited)
		point("called by libc");
	waited = true;
	return 0;
}

static void handle(int number)
{
	point(number == SIGUSR1 ? "signal" : "signal on its own stack");
	sink = sink + 1;
}

APART static void interrupted(int number)
{
	raise(number);
	sink = sink + 1;
}

struct Guard {
	const char *name;

	~Guard() { point(name); }
};

APART static void thrower(int levels)
{
	if (!levels)
		throw levels;
	thrower(levels - 1);
	sink = sink + 1;
}

APART static void cleans_up(void)
{
	Guard guard = {"cleanup of an exception"};

	thrower(5);
	sink = sink + 1;
}

APART static void catches(void)
{
	try {
		cleans_up();
	} catch (int) {
		point("handler of an exception");
	}
	sink = sink + 1;
}

[[noreturn]] APART static void leaves(void)
{
	point("call that does not return");
	throw 1;
}

/* The call is the function's last instruction: its return address is another function's. */
APART static void ends_with_a_call(void)
{
	sink = sink + 1;
	leaves();
}

APART void throw_through_levels(void)
{
	for (int i = 0; i < 200; i++)
		try {
			thrower(12);
		} catch (int) {
			sink = sink + 1;
		}
}

APART void compute_in_aligned_frame(void)
{
	alignas(64) volatile double sums[8] = {};

	for (int i = 0; i < 400000; i++)
		sums[i & 7] = sums[i & 7] + i;
}

APART static unsigned long deeper(int levels)
{
	unsigned long sum = 0;

	if (levels)
		return deeper(levels - 1) + sink;
	for (int i = 0; i < 300000; i++)
		sum += i ^ sink;
	return sum;
}

APART void recurse(void) { sink = deeper(30); }

static void spend(int rounds)
{
	static void (*const branches[])() = {throw_through_levels, compute_in_aligned_frame, recurse};
	static const char *const names[] = {"throw_through_levels()", "compute_in_aligned_frame()", "recurse()"};
	unsigned long spent[3] = {}, begin;
	char text[100];

	for (int i = 0; i < rounds; i++)
		for (int branch = 0; branch < 3; branch++) {
			begin = now(CLOCK_THREAD_CPUTIME_ID);
			branches[branch]();
			spent[branch] += now(CLOCK_THREAD_CPUTIME_ID) - begin;
		}
	for (int branch = 0; branch < 3; branch++) {
		snprintf(text, sizeof(text), "%s\"%s\": %lu", branch ? ", " : "", names[branch], spent[branch]);
		said_spent += text;
	}
}

int main(int argc, char **argv)
{
	static char own_stack[1 << 16];
	stack_t other = {own_stack, 0, sizeof(own_stack)};
	struct sigaction action = {};
	int numbers[] = {2, 1};

	program = argv[0];
	action.sa_handler = handle;
	sigaction(SIGUSR1, &action, nullptr);
	action.sa_flags = SA_ONSTACK;
	sigaltstack(&other, nullptr);
	sigaction(SIGUSR2, &action, nullptr);
	point("main");
	plain(60);
	tail_call("tail call");
	variable_frame(1000 + argc);
	aligned_frame(1, 2, 3, 4, 5, 6, 7, argc);
	qsort(numbers, 2, sizeof(int), compare);
	interrupted(SIGUSR1);
	interrupted(SIGUSR2);
	catches();
	try {
		ends_with_a_call();
	} catch (int) {
	}
	std::thread([] { point("thread"); }).join();
	if (argc > 2 && *argv[2]) {
		void *library = dlopen(argv[2], RTLD_NOW);
		auto call = library ? reinterpret_cast<void (*)(void (*)(const char *))>(dlsym(library, "call_back")) : nullptr;

		if (!call)
			return 1;
		call(point);
	}
	spend(atoi(argv[1]));
	printf("{\"points\": [%s], \"spent\": {%s}}\n", said_points.c_str(), said_spent.c_str());
	return 0;
}
