-- Lifts the fencing tokens after a pg_upgrade or a restore, or when half of their numbers are used
-- up; else does nothing.
SELECT repair_lock_tokens()
