-- Takes advisory locks for the caller's transaction, one after the other in the
-- order given, and waits for all of them together for at most so long; 55P03
-- when that is over. Run it in a savepoint. The wait is cut to what the other
-- timeouts leave, which would abort the transaction: to 50 ms before them.
-- Afterwards lock_timeout is what it was, whatever that was and no matter who set it.
-- The number of rows is the answer, as in tx/lock_all.sql.
-- $1 keys, $2 what to do with each, as in tx/lock_all.sql, $3 milliseconds
--
-- The order in which this is computed matters: s before the locks, for they need
-- its deadline; the old lock_timeout is set again after them, for that is read
-- from the row that counts them. There is no join that the planner could turn
-- round. A lock_timeout counts from where a wait begins.
SELECT pg_catalog.generate_series(1,
       CASE WHEN q.locks < 0::bigint OR pg_catalog.set_config('lock_timeout', q.lock_timeout, true) IS NULL THEN 0
            WHEN pg_catalog.pg_is_in_recovery() THEN 3
            WHEN pg_catalog.starts_with(pg_catalog.current_setting('transaction_isolation'), 'read ') THEN 1
            ELSE 2 END)
  FROM (SELECT s.lock_timeout,
               (SELECT pg_catalog.count(k.lock_timeout)
                  FROM (SELECT pg_catalog.set_config('lock_timeout', GREATEST(1::numeric, LEAST(2147483647::numeric,
                                 pg_catalog.ceil(1000::numeric * extract(epoch FROM s.deadline - pg_catalog.clock_timestamp()))))::text, true) AS lock_timeout,
                               CASE k.what WHEN 0 THEN pg_catalog.pg_advisory_xact_lock(k.key)
                                           WHEN 1 THEN pg_catalog.pg_advisory_xact_lock_shared(k.key)
                                           WHEN 4 THEN pg_catalog.pg_advisory_xact_lock((k.key >> 32)::int, (k.key << 32 >> 32)::int)
                                           WHEN 5 THEN pg_catalog.pg_advisory_xact_lock_shared((k.key >> 32)::int, (k.key << 32 >> 32)::int) END
                          FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::int[])) AS k (key, what)
                         WHERE NOT pg_catalog.pg_is_in_recovery() OFFSET 0) k) AS locks
          FROM (SELECT pg_catalog.current_setting('lock_timeout') AS lock_timeout,
                       LEAST(pg_catalog.statement_timestamp() + pg_catalog.make_interval(secs => $3::float8 / 1000::float8),
                             pg_catalog.statement_timestamp() - interval '50 ms'
                               + NULLIF(pg_catalog.current_setting('statement_timeout'), '0')::interval,
                             pg_catalog.transaction_timestamp() - interval '50 ms'
                               + NULLIF(pg_catalog.current_setting('transaction_timeout', true), '0')::interval) AS deadline
                OFFSET 0) s
        OFFSET 0) q
