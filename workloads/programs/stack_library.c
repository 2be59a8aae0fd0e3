// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* A library for stack_points.cpp, loaded while it runs. */
static volatile int sink;

__attribute__((noinline)) static void within(void (*point)(const char *), int levels)
{
	if (levels)
		within(point, levels - 1);
	else
		point("library");
	sink++;
}

void call_back(void (*point)(const char *))
{
	within(point, 3);
	sink++;
}
