-- Who has one advisory lock, as far as the role may know. The holder is named as
-- Lock.Holder names it.
-- $1 the number, $2 1, or 2 for a pair of numbers
PREPARE "pgxlock_holders /* session */" (bigint, int) AS
SELECT l.pid,
       l.mode = 'ShareLock',
       coalesce(pg_catalog.regexp_replace(a.application_name, '^pgxlock ', '') || ':' || l.pid, l.pid::text,
                'prepared transaction')
  FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
   AND l.classid = (($1 >> 32) & 4294967295)::oid AND l.objid = ($1 & 4294967295)::oid AND l.objsubid = $2
 ORDER BY l.pid
