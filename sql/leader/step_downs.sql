-- Which of these holders were asked to step down: of which entry, counted from 1, by
-- whom, why, and how many milliseconds ago. It says so once.
-- $1 kinds, $2 names, $3 holders
SELECT s.n, s.asked_by, s.reason, s.ms FROM /* schema */pgxlock_step_downs($1::integer[], $2::text[], $3::text[]) s
