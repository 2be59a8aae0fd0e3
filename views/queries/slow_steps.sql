-- Decode steps that lasted more than 1.5 times the median, the slowest first, with the operator that took most of each.
with decode as (
  select id, ts, dur, arg_set_id, row_number() over (order by dur) as rank, count(*) over () as n
  from slice where category = 'token' and extract_arg(arg_set_id, 'debug.phase') = 'decode'
),
usual as (select avg(dur) as dur from decode where rank in ((n + 1) / 2, (n + 2) / 2)),
slow as (select d.*, d.dur / u.dur as times from decode d, usual u where d.dur > 1.5 * u.dur)
select
  slow.ts as ts,
  slow.dur / 1e6 as ms,
  slow.times as times_median,
  extract_arg(slow.arg_set_id, 'debug.position') as position,
  (select s.name from slice s where s.category = 'operator' and s.ts >= slow.ts and s.ts < slow.ts + slow.dur
    order by s.dur desc limit 1) as longest_operator
from slow
order by slow.dur desc;
