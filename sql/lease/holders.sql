-- Returns the current holders of leases, exclusive and shared ones.
-- $1 names
SELECT k.name, h.holder, h.metadata, h.fencing_token,
       CASE WHEN isfinite(h.acquired_at) THEN h.acquired_at ELSE '0001-01-01 00:00:00Z' END,   -- what Go takes for no time
       CASE WHEN isfinite(h.expires_at) THEN h.expires_at ELSE '0001-01-01 00:00:00Z' END, h.shared
  FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS k (name, n), LATERAL /* schema */pgxlock_holders(k.name) AS h
 ORDER BY k.n
