-- Idle time of the NPU between two executions, the longest first: when, how long, and what came before and after.
with executes as (
  select s.ts, s.dur, s.name,
    lag(s.ts + s.dur) over (order by s.ts) as free_ts,
    lag(s.name) over (order by s.ts) as before
  from slice s join track t on s.track_id = t.id
  where t.name glob 'QNN Execute*'
)
select free_ts as ts, (ts - free_ts) / 1e3 as idle_us, before, name as after
from executes
where free_ts is not null and ts > free_ts
order by idle_us desc;
