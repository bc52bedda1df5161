-- The advisory locks of this database, of sessions and of transactions, those that are
-- waited for included: in one look at the lock table, which is looked at while all of it
-- is locked for a moment. So ask no more often than every few seconds.
-- Of a waiter, since when it waits, and which processes keep it from the lock: 0 is a
-- prepared transaction. In each row how many places are taken in the server's lock
-- table, how many there are at least, and whether the server is a standby, whose lock table
-- has none of the primary's advisory locks; if there is no lock, in one without a key.
-- What a role may see of other roles' sessions depends on its being a member of
-- pg_read_all_stats, as members of pg_monitor are: hidden says that it may not see the client.
WITH entry AS MATERIALIZED (
  SELECT l.locktype, l.database, l.classid, l.objid, l.objsubid, l.pid, l.mode, l.granted, l.fastpath, l.waitstart
    FROM pg_catalog.pg_locks l
), pressure AS (
  SELECT count(*) FILTER (WHERE NOT e.fastpath) AS taken,
         current_setting('max_locks_per_transaction')::bigint
         * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) AS room
    FROM entry e
), advisory AS (
  SELECT e.objsubid::integer AS space, e.classid::bigint << 32 | e.objid::bigint AS key, e.mode = 'ShareLock' AS shared,
         e.granted, e.pid, e.waitstart
    FROM entry e
   WHERE e.locktype = 'advisory'
     AND e.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
), session AS MATERIALIZED (               -- or the planner looks its role up for each lock
  SELECT a.pid, a.application_name, a.usename, a.client_addr, a.backend_start FROM pg_catalog.pg_stat_activity a
)
SELECT p.taken, p.room, pg_is_in_recovery() AS standby, e.space, e.key, coalesce(e.shared, false) AS shared,
       coalesce(e.granted, false) AS granted, coalesce(e.pid, 0) AS pid,
       coalesce(a.application_name, '') AS application,
       coalesce(a.usename::text, '') AS role,
       coalesce(host(a.client_addr), '') AS client,
       a.pid IS NOT NULL AND a.backend_start IS NULL AS hidden,
       e.waitstart AS waits_since,
       CASE WHEN NOT e.granted THEN pg_blocking_pids(e.pid) END AS blocked_by
  FROM pressure p
  LEFT JOIN advisory e ON true
  LEFT JOIN session a ON a.pid = e.pid
