-- Changes a lease, and so renews it: whether it was renewed, is gone or was skipped, and the version
-- of its row, which each change and renewal makes another one.
-- $1 name, $2 holder, $3 token, $4 whether it is a share, $5 the version that is changed (NULL: only
-- asks for it), $6 ttl in milliseconds, $7 metadata as JSON (NULL: stays)
SELECT c.outcome, c.version
  FROM /* schema */pgxlock_change_lease($1::text, $2::text, $3::bigint, $4::boolean, $5::text, $6::bigint, $7::text) AS c
