// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * An arm64 program that prints its registers and its stack at one point, and the return addresses that backtrace() gives there, as
 * JSON: for a machine of another architecture, which emulates it.
 */
#include <execinfo.h>
#include <stdio.h>
#include <string.h>

#define MOST_BYTES 16384
#define APART __attribute__((noipa))

static volatile int sink;
static unsigned long registers[33];
static unsigned char copy[MOST_BYTES];

APART static void dump(const char *top)
{
	void *frames[100];
	int count = backtrace(frames, 100);
	size_t bytes;

	__asm__ volatile("stp x29, x30, [%0, #232]\n"
			 "stp x19, x20, [%0, #152]\n"
			 "stp x21, x22, [%0, #168]\n"
			 "stp x23, x24, [%0, #184]\n"
			 "stp x25, x26, [%0, #200]\n"
			 "stp x27, x28, [%0, #216]\n"
			 "mov x9, sp\n"
			 "adr x10, .\n"
			 "stp x9, x10, [%0, #248]\n"
			 :
			 : "r"(registers)
			 : "x9", "x10", "memory");
	bytes = top - (const char *)registers[31] < MOST_BYTES ? top - (const char *)registers[31] : MOST_BYTES;
	memcpy(copy, (const void *)registers[31], bytes / 8 * 8);
	printf("{\"registers\": [");
	for (int i = 0; i < 33; i++)
		printf("%s%lu", i ? ", " : "", registers[i]);
	printf("], \"frames\": [");
	for (int i = 0; i < count; i++)
		printf("%s%lu", i ? ", " : "", (unsigned long)frames[i]);
	printf("], \"stack\": \"");
	for (size_t i = 0; i < bytes / 8 * 8; i++)
		printf("%02x", copy[i]);
	printf("\"}\n");
}

APART static void variable(const char *top, int bytes)
{
	char *room = __builtin_alloca(bytes);

	memset(room, 1, bytes);
	dump(top);
	sink += room[bytes / 2];
}

APART static void deeper(const char *top, int levels)
{
	if (levels)
		deeper(top, levels - 1);
	else
		variable(top, 500 + levels);
	sink++;
}

int main(void)
{
	char here[64];

	memset(here, 0, sizeof(here));
	deeper((const char *)__builtin_frame_address(0) + 4096, 12);
	sink += here[sink & 63];
	return 0;
}
