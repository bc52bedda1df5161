-- How many standbys stream from here, and how many of them commits wait for (0
-- also where this role may not know). Backups come by the same way.
SELECT count(*) FILTER (WHERE r.state IS DISTINCT FROM 'backup'), count(*) FILTER (WHERE r.sync_state IN ('sync', 'quorum'))
  FROM pg_stat_replication r
