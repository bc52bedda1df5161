-- Names behind advisory keys, which Lockers published that held them.
SELECT n.key_id AS key, n.name FROM /* schema */pgxlock_names n
