-- Names behind advisory keys, which Lockers published that held them: the newest 20,000, and
-- left_out in one more if there are others.
SELECT n.key_id AS key, CASE WHEN char_length(n.name) <= 255 THEN n.name ELSE '' END AS name,
       row_number() OVER (ORDER BY n.held_at DESC) > 20000 AS left_out
  FROM /* schema */pgxlock_names n ORDER BY n.held_at DESC LIMIT 20001
