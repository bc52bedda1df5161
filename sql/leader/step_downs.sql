-- Which of these holders were asked to step down: of which entry, counted from 1, by
-- whom, why, how many milliseconds ago, and when; of long texts the beginning.
-- $1 kinds, $2 names, $3 holders
SELECT s.n, pg_catalog.left(s.asked_by, 1000), pg_catalog.left(s.reason, 1000), s.ms, s.asked_us
  FROM /* schema */pgxlock_step_downs($1::integer[], $2::text[], $3::text[]) s
