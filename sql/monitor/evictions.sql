-- By whom and why holders were evicted, the last eviction last. Of leases, permits and shares that
-- nobody has acquired since: an evicted lease keeps its token and loses its holder, an evicted
-- share the other way round. Of advisory locks whose session was asked within the last 10 seconds:
-- Evict asks several times a second, and the session may acquire the lock again later.
SELECT e.kind, e.name, e.holder, e.token, e.evicted_by, e.reason
  FROM /* schema */pgxlock_evictions e
 WHERE CASE WHEN e.kind <> 0 THEN e.evicted_at > clock_timestamp() - interval '10 seconds'
            ELSE EXISTS (SELECT FROM /* schema */lock_leases l
                          WHERE l.lock_name::text = e.name COLLATE "C"
                            AND l.holder_id::text = '*evicted' COLLATE "C"
                            AND l.fencing_token = e.token)
              OR EXISTS (SELECT FROM /* schema */lock_shares s
                          WHERE s.lock_name::text = e.name COLLATE "C"
                            AND s.holder_id::text = e.holder COLLATE "C"
                            AND s.fencing_token = 0) END
 ORDER BY e.evicted_at
