SELECT application_name, count(*)
  FROM pg_stat_activity
 WHERE backend_type = 'client backend' AND application_name LIKE 'pgxlock worker-%'
 GROUP BY application_name
