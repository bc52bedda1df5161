-- Who holds leases now, exclusively or together.
-- $1 names
SELECT k.name, h.holder, h.metadata, h.fencing_token, h.acquired_at, h.expires_at, h.shared
  FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS k (name, n), LATERAL /* schema */pgxlock_share_holders(k.name) AS h
 ORDER BY k.n
