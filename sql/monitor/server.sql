-- What presses on locks from the server's side: how full the queue of notifications is,
-- from 0 to 1; the transaction whose snapshot is the oldest, behind which the rows of
-- leases that were renewed and given back cannot be cleaned up; and whether this role
-- may see the sessions of others, and which role that is.
SELECT clock_timestamp() AS at,
       pg_notification_queue_usage() AS notifications,
       s.pid AS oldest_pid,
       s.xact_start AS oldest_since,
       pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS sees_all,
       current_user::text AS role
  FROM (SELECT) one
  LEFT JOIN (SELECT a.pid, a.xact_start FROM pg_catalog.pg_stat_activity a
              WHERE a.backend_xmin IS NOT NULL AND a.xact_start IS NOT NULL AND a.pid <> pg_backend_pid()
              ORDER BY a.xact_start LIMIT 1) s ON true
