// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The driver between CPU and NPU: FastRPC's tracepoints (Qualcomm's kernels), and those of GLINK, which carries its messages (Linux
 * 6.12). They belong to modules, whose types are not in the kernel's BTF: user space reads the fields' offsets from tracefs.
 */

static INLINE u64 driver_field(void *ctx, struct driver_field *field)
{
	u64 value[2] = {};
	u32 at = field->offset & (DRIVER_RECORD_BYTES - 1), place = 0;

	if (field->is_text) { /* the record holds its offset; read its first eight letters */
		bpf_probe_read_kernel(&place, sizeof(place), (char *)ctx + at);
		at = place & (DRIVER_RECORD_BYTES - 1);
	}
	bpf_probe_read_kernel(value, field->width & 15, (char *)ctx + at);
	return value[0];
}

/* Calls are made on the target's threads; answers may arrive on any thread. */
static INLINE int driver_event(void *ctx, u32 event, bool is_answer)
{
	struct driver_layout *layout = map_lookup(MAP(driver_layouts), &event);
	RECORD(rec_driver_event, r);

	if (!layout || !(is_answer || traced()) || !reserve(r, KIND_DRIVER_EVENT, ENGINE_KERNEL))
		return 0;
	r->event = event;
	r->context = driver_field(ctx, &layout->fields[0]);
	r->value = driver_field(ctx, &layout->fields[1]);
	r->handle = driver_field(ctx, &layout->fields[2]);
	r->scalars = driver_field(ctx, &layout->fields[3]);
	r->status = driver_field(ctx, &layout->fields[4]);
	submit(ctx, r);
	return 0;
}

#define DRIVER_EVENT(category, name, event, is_answer)                                                                 \
	TRACEPOINT(category, name)                                                                                     \
	{                                                                                                              \
		return driver_event(ctx, event, is_answer);                                                            \
	}

DRIVER_EVENT(fastrpc, fastrpc_context_alloc, DRIVER_FASTRPC_CONTEXT_ALLOC, false)
DRIVER_EVENT(fastrpc, fastrpc_transport_send, DRIVER_FASTRPC_TRANSPORT_SEND, false)
DRIVER_EVENT(fastrpc, fastrpc_transport_send_ipcmsg, DRIVER_FASTRPC_TRANSPORT_SEND_IPCMSG, false)
DRIVER_EVENT(fastrpc, fastrpc_transport_response, DRIVER_FASTRPC_TRANSPORT_RESPONSE, true)
DRIVER_EVENT(fastrpc, fastrpc_context_interrupt, DRIVER_FASTRPC_CONTEXT_INTERRUPT, false)
DRIVER_EVENT(fastrpc, fastrpc_context_restore, DRIVER_FASTRPC_CONTEXT_RESTORE, false)
DRIVER_EVENT(fastrpc, fastrpc_context_complete, DRIVER_FASTRPC_CONTEXT_COMPLETE, true)
DRIVER_EVENT(fastrpc, fastrpc_context_free, DRIVER_FASTRPC_CONTEXT_FREE, false)
DRIVER_EVENT(fastrpc, fastrpc_dma_map, DRIVER_FASTRPC_DMA_MAP, false)
DRIVER_EVENT(fastrpc, fastrpc_dma_alloc, DRIVER_FASTRPC_DMA_ALLOC, false)
DRIVER_EVENT(fastrpc, fastrpc_dspsignal, DRIVER_FASTRPC_DSPSIGNAL, true)
DRIVER_EVENT(qcom_glink, qcom_glink_cmd_tx_data, DRIVER_QCOM_GLINK_CMD_TX_DATA, true)
DRIVER_EVENT(fastrpc, fastrpc_dma_unmap, DRIVER_FASTRPC_DMA_UNMAP, false)
DRIVER_EVENT(fastrpc, fastrpc_dma_free, DRIVER_FASTRPC_DMA_FREE, false)
DRIVER_EVENT(fastrpc, fastrpc_perf_counters, DRIVER_FASTRPC_PERF_COUNTERS, false)
