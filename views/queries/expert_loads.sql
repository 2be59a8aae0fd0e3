-- Loads of experts: demand loads, and prefetches with the run that used each. slack_us < 0: the run had to wait for it.
select
  l.ts as ts,
  l.name as load,
  extract_arg(l.arg_set_id, 'debug.reason') as reason,
  extract_arg(l.arg_set_id, 'debug.bytes') as bytes,
  l.dur / 1e6 as ms,
  'expert.' || extract_arg(r.arg_set_id, 'debug.layer') || '.' || extract_arg(r.arg_set_id, 'debug.expert') as used_by,
  (r.ts - l.ts - l.dur) / 1e3 as slack_us
from slice l
left join flow f on f.slice_out = l.id
left join slice r on r.id = f.slice_in
where l.category = 'cache' and l.dur > 0
order by l.dur desc;
