SELECT pg_terminate_backend(pid)
  FROM pg_stat_activity
 WHERE backend_type = 'client backend' AND application_name NOT LIKE 'chaos%' AND pid <> pg_backend_pid()
 ORDER BY random()
 LIMIT $1;
