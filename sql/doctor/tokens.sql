-- Whether tokens drawn from here on are greater than all that were seen, as
-- repair_lock_tokens() asks, and whether the server tells what makes them so.
-- $1 schema
SELECT e.singleton IS NOT NULL,
       coalesce(e.system_identifier = /* schema */pgxlock_system_identifier() AND t.timeline >= e.timeline, false),
       h.highest,
       coalesce(((e.epoch_base + CASE WHEN c.singleton THEN 0 ELSE 1 END + t.timeline * 64) << 40) + s.last_value, 0),
       s.last_value,
       /* schema */pgxlock_system_identifier() <> 0
       AND (SELECT position('pg_walfile_name' IN pg_get_function_sqlbody(p.oid)) > 0
              FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
             WHERE n.nspname = $1::text AND p.proname = 'pgxlock_timeline')
  FROM (SELECT /* schema */pgxlock_timeline() AS timeline) t LEFT JOIN /* schema */pgxlock_epoch e ON e.singleton
       LEFT JOIN /* schema */pgxlock_since_crash c ON c.singleton, /* schema */pgxlock_tokens s,
       (SELECT coalesce(max(l.fencing_token), 0) AS highest FROM /* schema */distributed_locks l) h
