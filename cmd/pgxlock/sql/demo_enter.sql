-- Enters the critical section: how many are in it now, oneself included?
UPDATE demo_section SET inside = inside + 1 RETURNING inside, clock_timestamp()
