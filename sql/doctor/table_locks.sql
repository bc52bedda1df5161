-- Sessions that keep callers out of our tables: each has, or waits for, a lock that conflicts with writing them.
-- PostgreSQL grants locks in order, and some before it checks whether the role may do what it asks for, so that all
-- calls wait behind a session that waits behind any transaction that names the table. A session that idles, or waits
-- for something else, with a lock that conflicts only with vacuum keeps that away, and is here, too.
-- Of a session that waits also the processes that it waits for; 0 would be a prepared transaction.
-- $1 schema
SELECT format('process %s (role %s%s)', l.pid, coalesce(a.usename::text, 'unknown'),
              coalesce(', ' || nullif(a.application_name, ''), '')),
       l.mode, string_agg(c.relname::text, ', ' ORDER BY c.relname), l.granted,
       array_remove(l.pid || CASE WHEN l.granted THEN '{}'::integer[] ELSE pg_blocking_pids(l.pid) END, 0)
  FROM pg_locks l
  JOIN pg_class c ON c.oid = l.relation
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'relation' AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
   AND (l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
        OR l.mode = 'ShareUpdateExclusiveLock' AND l.granted
           AND (a.state LIKE 'idle%' OR EXISTS (SELECT FROM pg_locks w WHERE w.pid = l.pid AND NOT w.granted)))
   AND n.nspname = $1::text
   AND (starts_with(c.relname, 'pgxlock_')
        OR starts_with(c.relname, 'distributed_lock')
        OR starts_with(c.relname, 'lock_'))
   AND a.usesysid IS NOT NULL               -- not of autovacuum, which gives way
 GROUP BY l.pid, l.mode, l.granted, a.usename, a.application_name
 ORDER BY l.granted DESC, l.pid LIMIT 5
