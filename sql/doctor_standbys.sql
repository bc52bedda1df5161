-- How many standbys stream from here, and how many of them commits wait for (0
-- also where this role may not know).
SELECT count(*), count(*) FILTER (WHERE r.sync_state IN ('sync', 'quorum')) FROM pg_stat_replication r
