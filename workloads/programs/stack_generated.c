// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Code without a file: stack_generated ROUNDS. It generates functions that call another one, and names all but one in perf's map:
 * one with a frame pointer, one as CPython's for `-X perf`, one without a name. Prints JSON: CPU time within each, ns.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef void inner(void);
typedef void generated(inner *call, long, long, inner *call_of_python);

static volatile unsigned long sink;

__attribute__((noinline)) void burn(void)
{
	for (int i = 0; i < 200000; i++)
		sink += i;
}

#if defined(__x86_64__)
static const unsigned char with_pointer[] = {0x55, 0x48, 0x89, 0xe5, 0xff, 0xd7, 0x5d, 0xc3};			/* push, mov, call *%rdi, pop, ret */
static const unsigned char of_python[] = {0x48, 0x83, 0xec, 0x08, 0xff, 0xd1, 0x48, 0x83, 0xc4, 0x08, 0xc3}; /* sub, call *%rcx, add, ret */
#else
static const unsigned with_pointer[] = {0xa9bf7bfd, 0x910003fd, 0xd63f0000, 0xa8c17bfd, 0xd65f03c0}; /* stp, mov, blr x0, ldp, ret */
static const unsigned of_python[] = {0xa9bf7bfd, 0x910003fd, 0xd63f0060, 0xa8c17bfd, 0xd65f03c0};    /* stp, mov, blr x3, ldp, ret */
#endif

static unsigned long cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

int main(int argc, char **argv)
{
	char *code = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), path[64];
	unsigned long spent[3] = {0}, begin;
	FILE *map;

	memcpy(code, with_pointer, sizeof(with_pointer));
	memcpy(code + 64, of_python, sizeof(of_python));
	memcpy(code + 128, with_pointer, sizeof(with_pointer));
	mprotect(code, 4096, PROT_READ | PROT_EXEC);
	__builtin___clear_cache(code, code + 4096);
	snprintf(path, sizeof(path), "/tmp/perf-%d.map", getpid());
	map = fopen(path, "w");
	fprintf(map, "%lx 40 generated_function\n%lx 40 py::Model.decode:/somewhere/model.py\n", (unsigned long)code, (unsigned long)code + 64);
	fclose(map);
	for (int i = 0; i < (argc > 1 ? atoi(argv[1]) : 500); i++)
		for (int k = 0; k < 3; k++) {
			begin = cpu_ns();
			((generated *)(code + 64 * k))(burn, 0, 0, burn);
			spent[k] += cpu_ns() - begin;
		}
	printf("{\"spent\": [%lu, %lu, %lu], \"pid\": %d}\n", spent[0], spent[1], spent[2], getpid());
	return 0;
}
