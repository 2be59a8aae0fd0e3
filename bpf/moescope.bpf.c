// SPDX-License-Identifier: Apache-2.0
#include "records.h"
union record {
	struct rec_token_begin token_begin; struct rec_token_end token_end; struct rec_graph_begin graph_begin; struct rec_graph_end graph_end;
	struct rec_op_begin op_begin; struct rec_op_end op_end; struct rec_op_wait op_wait; struct rec_expert_begin expert_begin; struct rec_expert_end expert_end;
	struct rec_load_begin load_begin; struct rec_load_end load_end; struct rec_evict evict;
	struct rec_qnn_execute_begin qnn_execute_begin; struct rec_qnn_execute_end qnn_execute_end; struct rec_qnn_call_begin qnn_call_begin; struct rec_qnn_call_end qnn_call_end; struct rec_qnn_harvest qnn_harvest;
	struct rec_sched_switch sched_switch; struct rec_sched_waking sched_waking; struct rec_task_fork task_fork; struct rec_task_exit task_exit;
	struct rec_tensor tensor; struct rec_route route; struct rec_qnn_event qnn_event; struct rec_qnn_sub_events qnn_sub_events; struct rec_qnn_object qnn_object; struct rec_qnn_table qnn_table; struct rec_library library; struct rec_task_exec task_exec;
};
enum record_kind unused_kind = 0; enum qnn_call unused_call = 0;
union record *unused_record = 0;
