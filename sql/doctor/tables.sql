-- What was altered about our tables, three texts, each '' for none: those that another access method than
-- PostgreSQL's own stores; those that were made unlogged, or logged where a crash must empty them; and those on
-- which triggers or rules of their owner run. doctor/escalation.sql finds those of other roles.
-- $1 schema
WITH ours AS (
  SELECT c.oid, c.relname, c.relkind, c.relowner, a.amname,
         c.relpersistence = 'u'
           AND c.relname NOT IN ('pgxlock_advisory_locks', 'pgxlock_limits', 'pgxlock_names', 'pgxlock_semaphores',
                                 'pgxlock_since_crash', 'pgxlock_step_down', 'pgxlock_waiters') AS forgets,
         c.relpersistence <> 'u' AND c.relname = 'pgxlock_since_crash' AS keeps
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_am a ON a.oid = c.relam
   WHERE n.nspname = $1::text AND c.relkind IN ('r', 'S')
     AND (starts_with(c.relname, 'pgxlock_') OR starts_with(c.relname, 'distributed_lock'))
)
SELECT coalesce(string_agg(o.relname || ' (' || o.amname || ')', ', ' ORDER BY o.relname)
                FILTER (WHERE o.relkind = 'r' AND o.amname <> 'heap'), ''),
       coalesce(string_agg(o.relname || CASE WHEN o.keeps THEN ' (logged)' ELSE ' (unlogged)' END, ', ' ORDER BY o.relname)
                FILTER (WHERE o.forgets OR o.keeps), ''),
       coalesce(string_agg(o.relname, ', ' ORDER BY o.relname) FILTER (WHERE
         EXISTS (SELECT FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
                  WHERE g.tgrelid = o.oid AND NOT g.tgisinternal AND pg_has_role(p.proowner, o.relowner, 'MEMBER'))
         OR o.relkind = 'r' AND EXISTS (SELECT FROM pg_rewrite w WHERE w.ev_class = o.oid)), '')
  FROM ours o
