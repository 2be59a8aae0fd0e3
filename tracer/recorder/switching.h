/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Switches levels off and on while recording, without making the drain wait for the kernel, and keeps the manifest's rows. */
#ifndef MOESCOPE_SWITCHING_H
#define MOESCOPE_SWITCHING_H

#include "speed.h"

struct changes {
	struct change *rows;
	int count, room;
};

void begin_changes(const struct change *changes, int count); /* all of them off, or all on */
bool is_switching(void);
bool continue_switching(void); /* true if a change has just been completed */
void end_switching(void);      /* waits for a change in progress */
u64 settled_ns(void);	       /* when the last change was completed */
void settle_now(void);
const struct changes *changes_so_far(void);

#endif
