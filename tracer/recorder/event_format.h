/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Where a tracepoint's fields stand, from its `format` in tracefs. */
#ifndef MOESCOPE_EVENT_FORMAT_H
#define MOESCOPE_EVENT_FORMAT_H

#include "types.h"

#include "structs.h"

/* Offset and width of a field in the tracepoint's record; unchanged if there is no such field. */
void read_field(const char *format_path, const char *name, struct driver_field *field);

#endif
