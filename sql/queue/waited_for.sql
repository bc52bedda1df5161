-- Whether others wait for each lock; one row per lock, in order.
-- $1 kinds, $2 names
SELECT w.waited_for
  FROM pg_catalog.unnest(/* schema */pgxlock_waited_for($1::integer[], $2::text[])) WITH ORDINALITY AS w (waited_for, n)
 ORDER BY w.n
