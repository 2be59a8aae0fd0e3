// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

#include "recorder.h"
#include "growing.h"
#include "switching.h"

#define RESTORE_NS 2000000ULL /* spent on attaching between two turns of the drain; one probe may take longer */

static struct changes changes;
static int first_row; /* of the change in progress */
static bool switching, restoring;
static pid_t remover;
static u64 settled;

bool is_switching(void)
{
	return switching;
}

u64 settled_ns(void)
{
	return settled;
}

void settle_now(void)
{
	settled = now_ns();
}

const struct changes *changes_so_far(void)
{
	return &changes;
}

void begin_changes(const struct change *wanted, int count)
{
	const char *levels[MOST_LEVELS];

	first_row = changes.count;
	for (int i = 0; i < count; i++) {
		*ADD(&changes) = wanted[i];
		levels[i] = wanted[i].level;
	}
	switching = true;
	restoring = wanted[0].on;
	if (restoring)
		restore_levels(levels, count);
	else
		remover = remove_levels(levels, count);
}

static bool is_carried_out(void)
{
	pid_t ended;

	if (restoring)
		return restore_some(now_ns() + RESTORE_NS);
	ended = remover > 0 ? waitpid(remover, NULL, WNOHANG) : -1;
	return ended == remover || (ended < 0 && errno != EINTR);
}

bool continue_switching(void)
{
	if (!switching || !is_carried_out())
		return false;
	if (!restoring)
		disturbed_since(changes.rows[first_row].ts_ns);
	set_settings(true);
	stacks_pause(is_shed(STACKS_LEVEL));
	switching = false;
	settled = now_ns();
	for (int i = first_row; i < changes.count; i++)
		changes.rows[i].done_ns = settled;
	return true;
}

void end_switching(void)
{
	while (switching && !continue_switching())
		usleep(1000);
}
