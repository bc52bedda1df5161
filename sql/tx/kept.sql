-- Whether the server knows of a lock that the transaction was granted: one row, or two where
-- conn/worker.sql is to be asked as well; none in an engine that grants every lock and keeps none.
-- $1 key, $2 what was done with it, as in tx/lock_all.sql
SELECT pg_catalog.generate_series(1, CASE WHEN pg_catalog.to_regclass('pg_catalog.pg_dist_local_group') IS NULL THEN 1 ELSE 2 END)
 WHERE EXISTS (SELECT FROM pg_catalog.pg_locks l  -- two, if it is held shared as well
                WHERE l.locktype = 'advisory' AND l.pid = pg_catalog.pg_backend_pid() AND l.granted
                  AND (l.classid::bigint << 32) | l.objid::bigint = $1::bigint
                  AND l.objsubid = CASE WHEN $2::int < 4 THEN 1::smallint ELSE 2::smallint END)
