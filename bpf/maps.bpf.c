// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Only the maps, for BCC: an object without programs loads on kernels without BTF for relocation. */
#include "compat.h"
#include "records.h"
#include "maps.h"
