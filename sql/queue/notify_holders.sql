-- Tells those who have advisory locks that others wait for them; one row per lock, in
-- order: how many were told.
-- $1 kinds, $2 keys
SELECT t.told
  FROM pg_catalog.unnest(/* schema */pgxlock_notify_holders($1::integer[], $2::bigint[])) WITH ORDINALITY AS t (told, n)
 ORDER BY t.n
