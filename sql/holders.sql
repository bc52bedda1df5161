-- Who holds leases now, where they cannot be shared.
-- $1 names
SELECT k.name, h.holder, h.metadata, h.fencing_token, h.acquired_at, h.expires_at, false
  FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS k (name, n), LATERAL /* schema */pgxlock_holders(k.name) AS h
 ORDER BY k.n
