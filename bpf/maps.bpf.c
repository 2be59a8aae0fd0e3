// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The maps alone, for BCC: an object without programs loads on kernels that have no BTF to relocate against. */
#include "compat.h"
#include "records.h"
#include "maps.h"
