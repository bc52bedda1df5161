-- The turns in the order in which they began.
SELECT worker, token, inside, entered_at, left_at FROM demo_turns ORDER BY entered_at
