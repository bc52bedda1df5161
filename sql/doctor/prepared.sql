-- Prepared transactions that hold advisory locks, or locks on our tables. Each of
-- their locks is listed like the one on the transaction's own id.
-- $1 schema
SELECT x.gid, extract(epoch FROM clock_timestamp() - x.prepared)::bigint, count(*)
  FROM pg_prepared_xacts x
       JOIN pg_locks own ON own.locktype = 'transactionid' AND own.transactionid = x.transaction AND own.pid IS NULL
       JOIN pg_locks l ON l.virtualtransaction = own.virtualtransaction AND l.pid IS NULL
       LEFT JOIN pg_class c ON c.oid = l.relation
       LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE x.database = current_database()
   AND (l.locktype = 'advisory'
        OR n.nspname = $1::text AND (starts_with(c.relname, 'pgxlock_') OR starts_with(c.relname, 'distributed_lock')))
 GROUP BY x.gid, x.prepared ORDER BY x.prepared
