-- Keys whose last run will not be started again, or may not have ended because its process has
-- died: a failed one without a lease, and one that has no lease or no live one and whose period is
-- over. Of a tick there is no period: a day.
SELECT r.run_key::text AS key, r.slot, r.state, r.holder, r.started_at, coalesce(r.error, '') AS error
  FROM (SELECT DISTINCT ON (o.run_key) o.* FROM /* schema */pgxlock_runs o   -- a key may have any number of runs
         WHERE o.state NOT IN ('withdrawn', 'skipped') ORDER BY o.run_key, o.slot DESC) r
 WHERE r.state IN ('running', 'failed')
   AND (r.state = 'failed' AND r.lease IS NULL OR r.slot + coalesce(r.period, interval '1 day') < clock_timestamp())
   AND NOT EXISTS (SELECT FROM /* schema */lock_leases l
                    WHERE l.lock_name::text = r.lease AND l.holder_id::text = r.holder AND l.state = 'live')
 ORDER BY r.slot DESC, r.run_key
 LIMIT 100
