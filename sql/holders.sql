-- Who holds a lease now.
-- $1 name
SELECT h.holder, h.metadata, h.fencing_token, h.acquired_at, h.expires_at FROM /* schema */pgxlock_holders($1::text) AS h
