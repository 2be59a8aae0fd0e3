-- Per step: what its operators, experts, loads and waits took, in ms, summed over threads.
with marked as (
  select category, ts, dur, max(case when category = 'token' then ts end) over (order by ts, category <> 'token') as step_ts
  from slice where category in ('token', 'operator', 'wait', 'expert', 'cache', 'io')
)
select
  extract_arg(t.arg_set_id, 'debug.phase') as phase,
  extract_arg(t.arg_set_id, 'debug.position') as position,
  t.ts as ts,
  t.dur / 1e6 as ms,
  sum(case when m.category = 'operator' then m.dur else 0 end) / 1e6 as operator_ms,
  sum(case when m.category = 'wait' then m.dur else 0 end) / 1e6 as wait_ms,
  sum(case when m.category = 'expert' then m.dur else 0 end) / 1e6 as expert_ms,
  sum(case when m.category = 'cache' then m.dur else 0 end) / 1e6 as load_ms,
  sum(case when m.category = 'io' then m.dur else 0 end) / 1e6 as io_ms
from slice t
join marked m on m.step_ts = t.ts and m.ts < t.ts + t.dur
where t.category = 'token'
group by t.id
order by t.ts;
