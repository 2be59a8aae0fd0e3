// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Messages for the user, and the warnings that a recording keeps. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "recorder.h"

static json_t *kept;

static void line(const char *format, va_list arguments, char *text, size_t bytes)
{
	vsnprintf(text, bytes, format, arguments);
	for (char *at = text; *at; at++) /* file names may contain control characters that move a terminal's cursor */
		if ((unsigned char)*at < ' ' || *at == 127)
			*at = '?';
	fprintf(stderr, "moescope: %s\n", text);
}

void say(const char *format, ...)
{
	char text[2 * PATH_MOST];
	va_list arguments;

	va_start(arguments, format);
	line(format, arguments, text, sizeof(text));
	va_end(arguments);
}

void warn(const char *format, ...)
{
	char text[2 * PATH_MOST];
	va_list arguments;

	va_start(arguments, format);
	line(format, arguments, text, sizeof(text));
	va_end(arguments);
	json_array_append_new(warnings(), plain_text(text));
}

void fail(const char *format, ...)
{
	char text[2 * PATH_MOST];
	va_list arguments;

	va_start(arguments, format);
	line(format, arguments, text, sizeof(text));
	va_end(arguments);
	exit(FAILED);
}

void check_descriptors(u64 least)
{
	struct rlimit allowed;

	if (!getrlimit(RLIMIT_NOFILE, &allowed) && allowed.rlim_cur < least)
		fail("only %llu files may be open at once, and each program and probe needs one: type `ulimit -n %llu` first",
		     (unsigned long long)allowed.rlim_cur, (unsigned long long)(least == UINT64_MAX ? 4 * allowed.rlim_cur : least));
}

json_t *warnings(void)
{
	if (!kept)
		kept = json_array();
	return kept;
}

json_t *plain_text(const char *text)
{
	json_t *answer = json_string(text);
	char *copy = answer ? NULL : strdup(text);

	if (!copy)
		return answer ? answer : json_string("");
	for (char *at = copy; *at; at++)
		if (*at & 0x80)
			*at = '?';
	answer = json_string(copy);
	free(copy);
	return answer;
}

u64 now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * NS_PER_S + now.tv_nsec;
}

double cpu_s(void)
{
	struct rusage used;

	getrusage(RUSAGE_SELF, &used);
	return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}
