// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* All probe handlers in one object: a file per concern, one set of maps. The loader loads only the needed programs. */
#include "compat.h"
#include "records.h"
#include "maps.h"
#include "ggml.h"

#include "token.bpf.c"
#include "graph.bpf.c"
#include "expert.bpf.c"
#include "pmc.bpf.c"
#include "operator.bpf.c"
#include "ggml.bpf.c"
#include "batch.bpf.c"
#include "hexagon.bpf.c"
#include "qnn.bpf.c"
#include "onnxruntime.bpf.c"
#include "genie.bpf.c"
#include "genai.bpf.c"
#include "executorch.bpf.c"
#include "bigmoeonedge.bpf.c"
#include "openvino.bpf.c"
#include "custom.bpf.c"
#include "driver.bpf.c"
#include "sched.bpf.c"
#include "io.bpf.c"
#include "process.bpf.c"
#include "heat.bpf.c"
#include "stacks.bpf.c"

#ifndef LOADER_BCC
/* Uses every record type, so that the object's BTF describes them to user space; never accessed. */
union record {
	struct rec_token_begin token_begin;
	struct rec_token_end token_end;
	struct rec_graph_begin graph_begin;
	struct rec_graph_end graph_end;
	struct rec_op_begin op_begin;
	struct rec_op_end op_end;
	struct rec_op_wait op_wait;
	struct rec_node node;
	struct rec_op_shares op_shares;
	struct rec_site site;
	struct rec_pmc pmc;
	struct rec_expert_begin expert_begin;
	struct rec_expert_end expert_end;
	struct rec_load_begin load_begin;
	struct rec_load_end load_end;
	struct rec_evict evict;
	struct rec_cache_hit cache_hit;
	struct rec_qnn_execute_begin qnn_execute_begin;
	struct rec_qnn_execute_end qnn_execute_end;
	struct rec_qnn_call_begin qnn_call_begin;
	struct rec_qnn_call_end qnn_call_end;
	struct rec_qnn_harvest qnn_harvest;
	struct rec_qnn_done qnn_done;
	struct rec_call_begin call_begin;
	struct rec_call_end call_end;
	struct rec_sched_switch sched_switch;
	struct rec_sched_waking sched_waking;
	struct rec_sched_wakeup sched_wakeup;
	struct rec_task_fork task_fork;
	struct rec_task_exit task_exit;
	struct rec_tensor tensor;
	struct rec_route route;
	struct rec_qnn_event qnn_event;
	struct rec_qnn_sub_events qnn_sub_events;
	struct rec_qnn_object qnn_object;
	struct rec_qnn_table qnn_table;
	struct rec_library library;
	struct rec_task_exec task_exec;
	struct rec_page_fault page_fault;
	struct rec_block_issue block_issue;
	struct rec_block_done block_done;
	struct rec_read_begin read_begin;
	struct rec_read_end read_end;
	struct rec_write write;
	struct rec_io_file io_file;
	struct rec_call_text call_text;
	struct rec_api_table api_table;
	struct rec_session session;
	struct rec_qnn_callback qnn_callback;
	struct rec_qnn_log qnn_log;
	struct rec_qnn_reader qnn_reader;
	struct rec_genie_profile genie_profile;
	struct rec_hexagon_batch hexagon_batch;
	struct rec_hexagon_sent hexagon_sent;
	struct rec_hexagon_done hexagon_done;
	struct rec_hexagon_call hexagon_call;
	struct rec_hexagon_graph hexagon_graph;
	struct rec_hexagon_node hexagon_node;
	struct rec_hexagon_op hexagon_op;
	struct rec_hexagon_profile hexagon_profile;
	struct rec_misfit misfit;
	struct rec_heat heat;
	struct rec_power power;
	struct rec_driver_event driver_event;
	struct rec_batch_rows batch_rows;
};

const union record *record_types = 0;
const enum record_kind record_kinds = 0;
const enum qnn_call qnn_calls = 0;
const enum backend_id backend_ids = 0;
const enum hexagon_call hexagon_calls = 0;
const enum heat_of heat_ofs = 0;
const enum supply supplies = 0;
const enum driver_event driver_events = 0;
const enum engine_id engine_ids = 0;
const enum misfit_of misfits = 0;
const enum learning learnings = 0;
const enum qnn_backend qnn_backends = 0;
const enum limit limits = 0;
const enum none nones = 0;

char LICENSE[] SEC("license") = "Dual BSD/GPL";
#endif
