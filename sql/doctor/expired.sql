-- How many leases nobody gave back, nobody wants, and housekeeping should have
-- removed by now.
SELECT count(*) FROM /* schema */lock_leases l WHERE l.expires_at < clock_timestamp() - interval '2 hours'
