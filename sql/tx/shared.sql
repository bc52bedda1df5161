-- Which of the keys this session holds shared and not exclusively; one row each.
-- $1 keys, $2 what was to be done with each, as in tx/lock_all.sql
SELECT FROM pg_catalog.pg_locks l
 WHERE l.locktype = 'advisory' AND l.pid = pg_catalog.pg_backend_pid() AND l.granted
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
   AND EXISTS (SELECT FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::int[])) AS k (key, what)
                WHERE k.key = (l.classid::bigint << 32) | l.objid::bigint
                  AND l.objsubid = CASE WHEN k.what < 4 THEN 1::smallint ELSE 2::smallint END)
 GROUP BY l.classid, l.objid, l.objsubid HAVING pg_catalog.bool_and(l.mode = 'ShareLock')
