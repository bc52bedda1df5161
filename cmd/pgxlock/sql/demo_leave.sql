-- Leaves the critical section, and puts the turn on record.
-- $1 worker, $2 token, $3 how many were inside, $4 when it was entered
WITH gone AS (UPDATE demo_section SET inside = inside - 1)
INSERT INTO demo_turns (worker, token, inside, entered_at, left_at) VALUES ($1, $2, $3, $4, clock_timestamp())
